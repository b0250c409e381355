"""The bootstrap node: entry to the DHT, relay, the log of rounds, the matchmaker and the archive of payloads."""
