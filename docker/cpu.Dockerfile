# Image of crl for machines without a GPU. Build it in the root of the repository:
#   docker build --file docker/cpu.Dockerfile --tag crl:cpu .
# On x86_64, PyPI's torch contains the CUDA libraries. Add
#   --build-arg PIP_EXTRA_INDEX_URL=URL
# with PyTorch's index of CPU builds for an image without them.

FROM python:3.11-slim AS build
# Compilers for ALFWorld's planner and for packages without a wheel. Debian removes old versions.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/crl
# hnswlib is compiled for all processors, not for that of the builder.
ENV HNSWLIB_NO_NATIVE=1 \
    PATH=/opt/crl/bin:$PATH
WORKDIR /src
# Dependencies change less often than crl, so they have a layer of their own.
ARG PIP_EXTRA_INDEX_URL
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY crl/__init__.py crl/
COPY tasks tasks
RUN pip install --no-cache-dir '.[alfworld]' --constraint constraints.txt
COPY crl crl
RUN pip install --no-cache-dir --no-deps --force-reinstall .

FROM python:3.11-slim
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1001 crl \
    && install --directory --owner=crl --group=crl /home/crl/runs
COPY --from=build /opt/crl /opt/crl
ENV PATH=/opt/crl/bin:$PATH \
    OMP_NUM_THREADS=1 \
    PYTHONUNBUFFERED=1
USER 1001:1001
WORKDIR /home/crl
ENTRYPOINT ["crl"]
CMD ["--help"]
