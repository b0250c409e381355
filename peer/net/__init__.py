"""How peers talk: one interface (base), one implementation in memory, one over libp2p (p2p, the only user of hivemind)."""
