# The command in an image without a shell, as a user without rights. Models, data and runs are mounted:
#     docker build -t tandem .
#     docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" tandem train run.toml
# With GPUs, add `--gpus all`: the driver's libraries come from the host.
FROM rust:1-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN cargo build --profile dist --locked -p tandem-cli && cp target/dist/tandem /tandem

FROM gcr.io/distroless/cc-debian12:nonroot
COPY --from=build /tandem /usr/local/bin/tandem
ENV HF_HOME=/work/.huggingface NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /work
ENTRYPOINT ["/usr/local/bin/tandem"]
