"""The DFlash drafter as float64 equations, and random checkpoints to feed it."""
