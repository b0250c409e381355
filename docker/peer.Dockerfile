# A volunteer's machine, CPU. For NVIDIA GPUs: docker build --build-arg TORCH_INDEX=https://pypi.org/simple (the CUDA build).
FROM python:3.12-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /opt/potluck
COPY constraints.txt .
RUN pip install --no-cache-dir -c constraints.txt --index-url ${TORCH_INDEX} --extra-index-url https://pypi.org/simple torch
COPY . .
RUN pip install --no-cache-dir -c constraints.txt .
VOLUME /data
ENV XDG_CACHE_HOME=/data/cache
ENTRYPOINT ["potluck", "join", "--dir", "/data/peer"]
