#!/usr/bin/env bash
# The figures of README.md, measured on this machine's GPU: tests/gpu/figures.sh FOLDER [STEP ...]
# Steps: forward backward training decode article mods gpt (default: all). Each writes a file; one that takes too long keeps what it
# has. FA3 and FA4 take part where fa3-fwd and flash-attn-4 are installed.
set -u
folder=$1
shift
mkdir -p "$folder"
flashgen() { python -c 'from flashgen.cli import main; main()' "$@"; }
limited() { timeout --signal INT "${LIMIT_S:-400}" "$@"; }
export -f flashgen

bench() {
    name=$1
    shift
    limited bash -c 'flashgen bench --json "$@"' bench "$@" > "$folder/$name.json" 2> "$folder/$name.log"
    echo "$name: $? ($(grep -c median_us "$folder/$name.json") rows)"
}

for step in "${@:-forward backward training decode article mods gpt}"; do
    for each in $step; do
        case $each in
            forward) bench forward --host --head-dim 64,128,256 --seq 512,2048,8192,16384 --peers flashgen,fa2,cudnn,flex,fa3,fa4 ;;
            backward) bench backward --host --op backward --head-dim 64,128,256 --seq 2048,8192,16384 --peers flashgen,fa2,cudnn,flex,fa4 ;;
            training) bench training --op training --head-dim 64,128 --seq 2048,8192 --peers flashgen,fa2,cudnn,flex,fa4 ;;
            decode) bench decode --op decode ;;
            article) bench article --dtype fp16 --heads 8 --head-dim 128 --seq 512,1024,2048,4096,8192,16384,32768 --memory --peers flashgen,fa2,plain ;;
            mods)
                bench mods_forward --mods --head-dim 64,128 --seq 4096,16384 --peers flashgen,flex,fa3,fa4
                bench mods_backward --op backward --mods --head-dim 64,128 --seq 4096,16384 --peers flashgen,flex,fa4
                ;;
            gpt) limited python "$(dirname "$0")/train_gpt.py" > "$folder/gpt.txt" 2>&1; echo "gpt: $?" ;;
        esac
    done
done
