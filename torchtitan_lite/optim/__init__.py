"""What happens to gradients and weights at the end of a step: schedule, norm and clip, update."""
