"""Other people's DFlash implementations, run on our fixtures."""
