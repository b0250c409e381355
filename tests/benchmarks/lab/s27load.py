import lzma
def load(p): return lzma.decompress(open(p, "rb").read())
