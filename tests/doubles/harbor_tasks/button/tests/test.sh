#!/bin/bash
if [ "$(cat /app/pressed)" = 10 ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
