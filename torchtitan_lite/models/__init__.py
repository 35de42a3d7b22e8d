"""Plain single-device modules: nothing here knows of meshes, stages or ranks."""
