# An operator's bootstrap node. Build it from the checkout: docker build -f docker/bootstrap.Dockerfile -t potluck-bootstrap .
# Mount a folder with the run's manifest, run.toml, and its corpus, corpus/, at /run-files; the node's key, its log and the payloads are in /data.
# pip takes its package index from the build arguments; without them it uses its own default (docs/guides/docker.md).
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
EXPOSE 31337
ENTRYPOINT ["potluck", "bootstrap", "--dir", "/data/bootstrap", "--host", "0.0.0.0", "--port", "31337"]
CMD ["/run-files/run.toml", "--corpus", "/run-files/corpus"]
