"""Content-addressed blobs (protocol/codec/blob_hash.py): kept on disk, served to anyone, fetched from anyone who holds them."""

from peer.net.blobs.fetching import Fetcher, fetch_named
from peer.net.blobs.serving import NODE_COPIES, BlobServer
from peer.net.blobs.store import NO_ROUND, Blob, BlobStore, disk_error, sync_folder, write_durably

__all__ = [
    "NODE_COPIES",
    "NO_ROUND",
    "Blob",
    "BlobServer",
    "BlobStore",
    "Fetcher",
    "disk_error",
    "fetch_named",
    "sync_folder",
    "write_durably",
]
