"""A run's fixed description: manifest, model shards, first state, text index and data order.

Front door: `manifest.Manifest`, `layout` (`ModelSpec`, `shard_names`, `shapes`), `corpus.CorpusIndex`,
`init.initial_shard`, `presets.PRESETS`.
"""
