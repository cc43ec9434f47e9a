"""Files of runs and checkpoints: names, layouts, and safe ways of reading them."""
