"""Ba et al. 2016, "Using fast weights to attend to the recent past"."""
