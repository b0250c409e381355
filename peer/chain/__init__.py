"""One replica on many machines: what the stages of a chain do and send each other."""
