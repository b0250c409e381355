# An operator's bootstrap node. Mount the run's manifest and tokenizer at /run-files, state stays in /data.
FROM python:3.12-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /opt/potluck
COPY constraints.txt .
RUN pip install --no-cache-dir -c constraints.txt --index-url ${TORCH_INDEX} --extra-index-url https://pypi.org/simple torch
COPY . .
RUN pip install --no-cache-dir -c constraints.txt .
VOLUME /data
EXPOSE 31337
ENTRYPOINT ["potluck", "bootstrap", "--dir", "/data/bootstrap", "--host", "0.0.0.0", "--port", "31337"]
CMD ["/run-files/run.toml"]
