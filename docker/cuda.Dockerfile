# Image of crl with vLLM and DeepSpeed for NVIDIA GPUs. Build it in the root of the repository:
#   docker build --file docker/cuda.Dockerfile --tag crl:cuda .
# --build-arg EXTRAS=… selects the extras.

# The CUDA version of PyPI's torch. DeepSpeed and vLLM compile kernels with its nvcc at run time.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04
# Ubuntu removes old versions of packages.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        g++ make python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1001 crl \
    && install --directory --owner=crl --group=crl /home/crl/runs
RUN python3.12 -m venv /opt/crl
# hnswlib is compiled for all processors, not for that of the builder.
ENV HNSWLIB_NO_NATIVE=1 \
    PATH=/opt/crl/bin:$PATH
WORKDIR /src
# Dependencies change less often than crl, so they have a layer of their own.
ARG EXTRAS=vllm,deepspeed,lora,alfworld
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY crl/__init__.py crl/
COPY tasks tasks
RUN pip install --no-cache-dir ".[${EXTRAS}]" --constraint constraints.txt
COPY crl crl
RUN pip install --no-cache-dir --no-deps --force-reinstall .
ENV CUDA_HOME=/usr/local/cuda \
    PYTHONUNBUFFERED=1
USER 1001:1001
WORKDIR /home/crl
ENTRYPOINT ["crl"]
CMD ["--help"]
