# Sourced: lets uv look where pip is configured to look, for uv does not read pip's configuration.

# Prints pip's setting $1 (e.g. find-links): the PIP_* variable, else the configuration file, else nothing.
pip_setting() {
    local variable
    variable="PIP_$(tr 'a-z-' 'A-Z_' <<<"$1")"
    echo "${!variable:-$("$python" -m pip config get "global.$1" 2>/dev/null || true)}"
}

use_pip_settings() {
    local find_links index certificates
    find_links=$(pip_setting find-links)
    index=$(pip_setting index-url)
    certificates=$(pip_setting cert)
    # pip separates by blanks, uv by commas
    [[ -z $find_links ]] || export UV_FIND_LINKS="${UV_FIND_LINKS:-$(tr -s ' \n' ',' <<<"$find_links" | sed 's/,$//')}"
    [[ -z $index ]] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"
    [[ -z $certificates ]] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$certificates}"
}
