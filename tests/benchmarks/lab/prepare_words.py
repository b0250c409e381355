import glob, numpy as np, pyarrow.parquet as pq, tokenizers, time, subprocess, os
t=time.time()
tk=tokenizers.Tokenizer.from_file('data/tokenizers/wiki-8k.json'); print(tk.get_vocab_size())
def enc(files, most):
    out=[]; n=0
    for f in files:
        texts=pq.read_table(f, columns=['text'])['text'].to_pylist()
        for i in range(0,len(texts),500):
            for e in tk.encode_batch_fast(texts[i:i+500]) if hasattr(tk,'encode_batch_fast') else tk.encode_batch(texts[i:i+500]):
                out.append(np.array(e.ids+[0],dtype=np.uint16)); n+=len(e.ids)+1
            if n>=most: return np.concatenate(out)[:most]
    return np.concatenate(out)
h=enc(['data/wiki/valid-00000-of-00001.parquet'], 513*192); print(len(h))
a=enc(sorted(glob.glob('data/wiki/train*')), 42_000_000); print(len(a), time.time()-t)
np.save('held8k.npy', h[:513*128].reshape(-1,513))
m=len(a)//2
for i,p in enumerate((a[:m],a[m:])): p.tofile(f'w8k.{i}')
