# Ray's actors on one host. Sourced by `check`.

case_ray() {
    local version
    version="ray $(pypi_version "$(venv ray 300 ray 2>/dev/null)" ray)"
    check Ray "$version" "4 actors that set \`RANK\`, \`WORLD_SIZE\`, \`MASTER_ADDR\`, \`MASTER_PORT\`" ray_actors
}

ray_actors() {
    local prefix
    prefix=$(venv ray 300 ray)
    configure ray $short
    RAY_USAGE_STATS_ENABLED=0 on node0 timeout 120 "$prefix/bin/python" "$here/ray_ranks.py" 4 \
        "$CLUSTER/bin/tandem" train "$CLUSTER/ray.toml" 2>&1 | tee ray.txt
    says ray.txt "4 processes, started by RANK and WORLD_SIZE; engine: tcp" "exit codes [0, 0, 0, 0]"
    same ray $short
}
