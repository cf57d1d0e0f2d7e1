"""`fastweights bench cache`: the neural cache beside the loop over time that such caches are published with."""
