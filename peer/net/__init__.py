"""The network: one interface (base), implemented in memory and over libp2p (p2p, the only user of hivemind)."""
