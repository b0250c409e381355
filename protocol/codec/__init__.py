"""What is compressed: sparse updates, stage boundaries, and the names of blobs."""
