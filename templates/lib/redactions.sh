# Events that others get (a group's run, notify): these expressions of sed remove what looks like a secret, such as tokens,
# passwords and signatures in URLs, values after NAME= or NAME:, webhooks (hpcgen/redaction.py).
redactions=(
    's#://[^ \t\n/:@$]+:[^ \t\n/@$]+@#://[redacted]@#g'
    's#\b(hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{20,}|sk-[A-Za-z0-9_-]{30,}|A[KS]IA[A-Z0-9]{16}|xox[abp]-[A-Za-z0-9_-]{10,}|nvapi-[A-Za-z0-9_-]{20,}|wandb_v1_[A-Za-z0-9_]{20,}|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+)\b#[redacted]#g'
    's#(((TOKEN|SECRET|PASSWORD|PASSWD|APIKEY|API_KEY|CREDENTIALS?|PRIVATE_KEY|ACCESS_KEY)(_[A-Z0-9_]*)?|([Pp]assword|[Pp]asswd|[Ss]ecret|[Aa]pi[_-]?[Kk]ey|[Pp]rivate[_-][Kk]ey|[Aa]ccess[_-][Kk]ey|([Hh]f|[Hh]ub|[Aa]ccess|[Aa]uth|[Aa]pi)[_-][Tt]oken))\\?["'"'"']? *[=:] *\\?["'"'"']?)[^] \t\n"'"'"'$\\[][^ \t\n"'"'"']*#\1[redacted]#g'
    's#(https://(hooks\.slack\.com|discord(app)?\.com/api/webhooks|[A-Za-z0-9.-]+\.webhook\.office\.com)/|[?&](sig|[A-Za-z-]*[Ss]ignature|X-Amz-Credential|X-Amz-Security-Token|token|key|api_key|access_token)=)[^ \t\n"'"'"'<>&]+#\1[redacted]#g'
    's#\b(Bearer +|Authorization: *Basic +)[A-Za-z0-9+/=._~-]{16,}#\1[redacted]#g'
    's#(([Ww]andb|WANDB).{0,60})\b[0-9a-f]{40}\b#\1[redacted]#g'
)
