"""How operators decide a commit: Paxos among the members of a quorum."""
