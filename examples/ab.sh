#!/usr/bin/env bash
# Plain vLLM, then Sequoia: one server after the other, and the same random arrivals for each.
#
#   examples/ab.sh MODEL [options of `vllm bench serve`, such as --request-rate 4]
#
# $SERVE has options for both servers. LOAD=guidellm loads with guidellm 0.8, which needs a virtual
# environment of its own in $PATH: it brings another torch.
set -euo pipefail
model=$1 questions=$(dirname "$0")/smollm2/questions.jsonl folder=$(mktemp -d) port=${PORT:-8000}
shift
trap 'kill $(jobs -p) 2> /dev/null || true; wait' EXIT
# vLLM reads files of this form without pandas.
python -c 'import json, sys
asked = [json.loads(line)["prompt"] for line in open(sys.argv[1])]
json.dump([{"conversations": [{"value": one}, {"value": ""}]} for one in asked], sys.stdout)' \
    "$questions" > "$folder/questions.json"

load() {
    if [ "${LOAD:-vllm}" = guidellm ]; then
        guidellm run --profile kind=poisson,rate=2 --constraint kind=max_requests,count=60 \
            --data "kind=json_file,path=$questions" --backend "kind=openai_http,model=$model,\
target=http://localhost:$port,request_format=/v1/completions,max_tokens=96" "$@"
    else
        vllm bench serve --port "$port" --model "$model" --request-rate 2 --num-prompts 60 \
            --dataset-name sharegpt --dataset-path "$folder/questions.json" \
            --sharegpt-output-len 96 --ignore-eos --temperature 0 --disable-tqdm "$@"
    fi
}

for method in plain sequoia; do
    speculative=()
    [ $method = plain ] || speculative=(--speculative-config sequoia)
    # shellcheck disable=SC2086  # words of $SERVE
    vllm serve "$model" --port "$port" ${SERVE:-} "${speculative[@]}" > "$folder/$method.log" 2>&1 &
    until curl --silent --fail --output /dev/null "http://localhost:$port/health"; do
        kill -0 $! 2> /dev/null || { tail -n 20 "$folder/$method.log"; exit 1; }
        sleep 1
    done
    echo "== $method, log in $folder/$method.log"
    load "$@"
    kill $!
    wait $! || true
done
