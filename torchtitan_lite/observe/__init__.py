"""What a run tells about itself: log lines, metrics, traces and model FLOPs."""
