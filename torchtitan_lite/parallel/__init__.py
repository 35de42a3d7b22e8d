"""What turns a plain model into this rank's part of it; one verb a file."""
