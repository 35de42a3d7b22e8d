"""What a run leaves on disk, and how any other run takes it up."""
