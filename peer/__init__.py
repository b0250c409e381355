"""The peer: what a volunteer runs to train together with others."""
