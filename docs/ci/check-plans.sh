#!/bin/sh
# Holds the plans of a change against golden ones: for any CI, in the root of the repository.
#
#   LIST    what is planned                     PLANS   the golden plans
#   POLICY  how much worse they may be          OUT     where new plans and the report go
#   SITSC   the command                         JOBS    processes
#
# Prints what changed as Markdown and leaves it in $OUT/report.md. Exit code: 0 within the policy, 1
# outside of it, 2 when something is wrong. Needs no GPU and no weights of presets.
set -eu
: "${LIST:=plans/plans.toml}" "${PLANS:=plans}" "${POLICY:=plans/policy.toml}"
: "${OUT:=build/plans}" "${SITSC:=.venv/bin/sitsc}" "${JOBS:=2}"

rm -rf "$OUT/new" "$OUT/report.md"
mkdir -p "$OUT"
"$SITSC" plan make --list "$LIST" --jobs "$JOBS" -o "$OUT/new" >&2 || exit 2

status=0
"$SITSC" plan diff "$PLANS" "$OUT/new" --policy "$POLICY" --markdown > "$OUT/report.md" || status=$?
cat "$OUT/report.md"
exit "$status"
