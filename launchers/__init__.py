"""What runs before or around a training process: the demo, environment checks."""
