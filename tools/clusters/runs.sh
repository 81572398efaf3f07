# The tiny run of every case, and what it must end with. Sourced by `check`.

# Steps of a run that is only started, and of one that is interrupted.
short=20 long=600

# The model, and what both kinds of run end with on one rank.
create_model() {
    mkdir -p "$CLUSTER/bin"
    cp "$tandem" "$CLUSTER/bin/tandem"
    python3 "$here/tiny_model.py" "$CLUSTER"
    cd "$CLUSTER"
    tandem init-weights source model --seed 3 >/dev/null
    local steps
    for steps in $short $long; do
        configure "whole-$steps" "$steps"
        tandem train "whole-$steps.toml" 2>"whole-$steps.txt" || { tail -n 5 "whole-$steps.txt" >&2; return 1; }
    done
}

# configure NAME STEPS [ENGINE]: writes NAME.toml.
configure() {
    cat >"$CLUSTER/$1.toml" <<TOML
method = "dpo"
model = "$CLUSTER/model"
output = "$CLUSTER/$1"
[data]
train = "$CLUSTER/preferences.jsonl"
cache = "$CLUSTER/cache"
max_length = 128
[train]
batch_size = 8
micro_batch_size = 1
steps = $2
learning_rate = 1e-3
save_every = $(($2 / 20 + 4))
[compute]
devices = "cpu"
dtype = "f32"
threads = 1
engine = "${3:-auto}"
deadline = 20
TOML
}

# same RUN STEPS: fails unless the run ended with the weights and metrics of one rank.
same() {
    local whole=$CLUSTER/whole-$2 run=$CLUSTER/$1
    if [ "$(sha256 "$run/final/model.safetensors")" != "$(sha256 "$whole/final/model.safetensors")" ]; then
        echo "$1 ends with other weights than a run on one rank" >&2
        return 1
    fi
    if ! diff <(timeless "$whole/metrics.jsonl") <(timeless "$run/metrics.jsonl"); then
        echo "$1 has other metrics than a run on one rank" >&2
        return 1
    fi
}

sha256() { sha256sum "$1" | cut -d ' ' -f 1; }

# Metrics without what depends on the clock and the number of ranks.
timeless() { sed -E 's/,"(time|memory|arena|tokens_per_second)":[^,}]*//g' "$1"; }

# The newest complete checkpoint's step; 0 without one.
newest_step() {
    local newest
    newest=$(find "$CLUSTER/$1/checkpoints" -maxdepth 1 -name 'step-[0-9]*' -printf '%f\n' 2>/dev/null | sort | tail -n 1)
    echo $((10#0${newest#step-}))
}

# await_step RUN STEP: waits for a checkpoint of this step or a later one.
await_step() {
    local until=$((SECONDS + 60))
    while [ "$(newest_step "$1")" -lt "$2" ]; do
        [ $SECONDS -lt $until ] || { echo "$1 has not reached step $2 in 60 s" >&2; return 1; }
        sleep 0.05
    done
}

# ended CODE PROCESS: fails unless the background process ends with this code.
ended() {
    local code=0
    wait "$2" || code=$?
    [ "$code" -eq "$1" ] || { echo "exit code $code, and $1 was expected" >&2; return 1; }
}

# says FILE TEXT...: fails unless the file has each text.
says() {
    local text
    for text in "${@:2}"; do
        grep -qF -- "$text" "$1" || { echo "no \"$text\" in $1:" >&2; tail -n 40 "$1" >&2; return 1; }
    done
}
