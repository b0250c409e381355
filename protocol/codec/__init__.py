"""Compression and content addressing: sparse updates, number formats, seeded random numbers, blob names.

Front door: `sparse` (`encode`, `decode`, `apply`), `formats` (`Codec`, `bytes_per_token`), `blob_hash.name_of`,
`philox.normal_like`.
"""
