# Kubernetes's manifests: their fields by official schemas, and their pods as hosts. No Kubernetes runs. Sourced by `check`.

case_kubernetes() {
    local name
    for name in job jobset pytorchjob; do
        check "$name.yaml" "schemas of PyPI" "each field of the manifest" manifest_fields $name
        check "$name.yaml" "hosts as pods" "variables, names and commands of its 4 pods, with its volume at /data" manifest_pods $name
    done
}

# Sets `python`, which has the schemas.
schemas() {
    python=$(venv kubernetes 180 kubernetes-validate kubeflow-trainer-api kubeflow-training)/bin/python
}

manifest_fields() {
    local python list=kubernetes-validate
    schemas
    "$python" "$here/manifests.py" check "$root/examples/launch/$1.yaml"
    # A check that finds nothing might look at nothing.
    sed 's/terminationGracePeriodSeconds/terminationGraceSeconds/' "$root/examples/launch/$1.yaml" >misspelt.yaml
    if "$python" "$here/manifests.py" check misspelt.yaml; then
        echo "a misspelt field is not found"
        return 1
    fi
    case $1 in
        jobset) list+=", kubeflow-trainer-api" ;;
        pytorchjob) list+=", kubeflow-training" ;;
    esac
    list=$(for package in ${list//,/}; do printf '%s %s, ' $package "$(pypi_version "$venvs/kubernetes" $package)"; done)
    found "all known to ${list%, }"
}

manifest_pods() {
    local python number=0 name command pods=()
    schemas
    "$python" "$here/manifests.py" pods "$root/examples/launch/$1.yaml" >pods
    mkdir -p data
    configure "$1" $short
    cp "$1.toml" data/run.toml
    while read -r name command; do
        printf '10.83.7.%d %s\n' $((number + 1)) "$name" >>etc-hosts
        number=$((number + 1))
    done <pods
    number=0
    while read -r name command; do
        # shellcheck disable=SC2086
        eval "on node$number timeout 60 $command" &
        pods+=($!)
        number=$((number + 1))
    done <pods
    [ $number -eq 4 ]
    for command in "${pods[@]}"; do ended 0 "$command"; done
    rm -r data
    same "$1" $short
}
