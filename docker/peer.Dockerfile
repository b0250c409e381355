# A volunteer's machine. Build it from the checkout: docker build -f docker/peer.Dockerfile -t potluck-peer .
# pip takes its package index from the build arguments; without them it uses its own default. docs/guides/docker.md says
# which index has the small CPU build of torch. The default index has the CUDA build, which runs on CPUs too.
FROM python:3.12-slim
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
WORKDIR /opt/potluck
COPY constraints.txt .
RUN pip install --no-cache-dir -c constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY protocol protocol
COPY peer peer
COPY bootstrap bootstrap
RUN pip install --no-cache-dir -c constraints.txt .
RUN useradd --create-home --uid 1000 potluck && install -d -o potluck /data
USER potluck
WORKDIR /data
VOLUME /data
ENTRYPOINT ["potluck", "join", "--dir", "/data/peer"]
