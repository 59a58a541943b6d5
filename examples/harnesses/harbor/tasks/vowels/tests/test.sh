#!/bin/bash
# a sixth for each vowel; "shaped" has a little more for a short text, so that rollouts which find none still differ
text=$(cat /app/answer.txt)
found=0
for vowel in a e i o u y; do
    case $text in *"$vowel"*) found=$((found + 1)) ;; esac
done
awk -v found=$found -v characters=${#text} 'BEGIN {
    printf "{\"reward\": %.17g, \"shaped\": %.17g,", found / 6, found / 6 + 0.1 / (1 + characters / 100)
    printf " \"vowels\": %d, \"characters\": %d}\n", found, characters
}' >/logs/verifier/reward.json
