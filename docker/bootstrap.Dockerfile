# An operator's bootstrap node. Build it from the checkout: docker build -f docker/bootstrap.Dockerfile -t potluck-bootstrap .
# It serves the run in /data/run, a folder that potluck init has made: the manifest, the corpus, and the node's key, log and payloads.
# pip takes its package index from the build arguments; without them it uses its own default (docs/guides/docker.md).
FROM python:3.12-slim
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
WORKDIR /opt/potluck
COPY constraints.txt .
RUN pip install --no-cache-dir -c constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
# What Potluck needs, without Potluck: a change of its code brings one small layer.
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" > needs.txt \
    && pip install --no-cache-dir -c constraints.txt -r needs.txt
COPY protocol protocol
COPY peer peer
COPY bootstrap bootstrap
RUN pip install --no-cache-dir --no-deps .
RUN useradd --create-home --uid 1000 potluck && install -d -o potluck /data /data/run /join
USER potluck
WORKDIR /data
VOLUME /data
EXPOSE 31337
# The node's event loop touches the file every 10 s.
HEALTHCHECK --interval=30s --timeout=10s --start-period=120s --retries=1 CMD find /data/run/node/alive -mmin -1 | grep -q .
ENTRYPOINT ["potluck", "bootstrap", "--dir", "/data/run/node", "--host", "0.0.0.0", "--port", "31337"]
CMD ["/data/run/run.toml", "--corpus", "/data/run/corpus"]
