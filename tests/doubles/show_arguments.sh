#!/usr/bin/env bash
# In the place of Python: the GPUs that it would see, and its arguments, one a line.
printf '%s\n' "gpus=$CUDA_VISIBLE_DEVICES" "$@"
