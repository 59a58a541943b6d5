#!/bin/bash
echo "My quick fox jumps over the lazy hare in rain." >/app/answer.txt
