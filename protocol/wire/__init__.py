"""Messages: their fields and bounds, encoding, signatures and framing.

Front door: `encoding` (`encode`, `decode`, `encode_record`, `decode_record`, `seal`, `unseal`), `framing.FrameReader`,
and the dataclasses of `session`, `commit`, `plan`, `ballot`, `decree`, `announcement`, `claims` and `calls`.
"""
