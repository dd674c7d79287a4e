#!/usr/bin/env bash
# One model over several machines with Ray. kvmosaic must be installed with vLLM on each of them.
#
#     deploy/vllm/ray.sh worker 10.0.0.1                                    on all machines but the first
#     deploy/vllm/ray.sh head 10.0.0.1 MODEL --tensor-parallel-size 8 --pipeline-parallel-size 2        on the first one
#
# 10.0.0.1 is the first machine's address, as the others reach it. The product of the two sizes is the number of GPUs.
# Try it with "check" in place of "head" first: it moves keys on every machine, says what it found, and ends.
set -euo pipefail

role=${1:?head, check or worker}
address=${2:?the address of the first machine}
shift 2

case $role in
    worker)
        exec ray start --block --address "$address:6379"
        ;;
    head | check)
        model=${1:?a model}
        shift
        ray start --head --node-ip-address "$address" --port 6379
        trap 'ray stop' EXIT
        if [ "$role" = check ]; then
            kvmosaic check "$model" --vllm -- --distributed-executor-backend ray "$@"
        else
            kvmosaic vllm serve "$model" --distributed-executor-backend ray "$@"
        fi
        ;;
    *)
        echo "the role is $role; say head, check or worker" >&2
        exit 2
        ;;
esac
