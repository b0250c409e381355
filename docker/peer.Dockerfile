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
# The peer's event loop touches the file every 10 s.
HEALTHCHECK --interval=30s --timeout=10s --start-period=120s --retries=1 CMD find /data/peer/alive -mmin -1 | grep -q .
ENTRYPOINT ["potluck", "join", "--dir", "/data/peer"]
