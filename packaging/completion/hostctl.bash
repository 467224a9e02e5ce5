# bash completion for hostctl(1)

_hostctl_vms() {
    hostctl list --names 2>/dev/null
}

_hostctl_layers() {
    hostctl layers "$1" --json 2>/dev/null | grep -o '"volume": "[^"]*"' | cut -d'"' -f4
}

_hostctl() {
    local cur prev word i
    local -a words=()
    cur=${COMP_WORDS[COMP_CWORD]}
    prev=${COMP_WORDS[COMP_CWORD - 1]}
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        case $word in
        --) return ;;
        --bus | --state | -n | --namespace | --kind | --why | --vmi-uid | --config) ((i++)) ;;
        -*) ;;
        *) words+=("$word") ;;
        esac
    done
    local command=${words[0]-} sub=${words[1]-}

    case $prev in
    --bus | --why | --vmi-uid | -n | --namespace) return ;;
    --config)
        COMPREPLY=($(compgen -f -- "$cur"))
        return
        ;;
    --state)
        if [[ $command == layers ]]; then
            COMPREPLY=($(compgen -W "mounted busy hung detached gone" -- "$cur"))
        else
            COMPREPLY=($(compgen -W "pending running exited held cleaning blocked released" -- "$cur"))
        fi
        return
        ;;
    --kind)
        if [[ $command == devices ]]; then
            COMPREPLY=($(compgen -W "pci mdev usb" -- "$cur"))
        else
            COMPREPLY=($(compgen -W "containerdisk kernel-boot hotplug-file hotplug-directory hotplug-block" -- "$cur"))
        fi
        return
        ;;
    esac

    local common="-h --help --json --bus" options=
    case $command in
    "") options="--version" ;;
    status) options="--short" ;;
    list) options="--state -n --namespace --names" ;;
    layers) options="--state --kind --paths" ;;
    release) options="--all --lazy --dry-run -y --yes" ;;
    sweep) options="--dry-run -y --yes" ;;
    hold) options="--all --why --keep --end" ;;
    devices)
        case $sub in
        claim) options="--vmi-uid" ;;
        release) ;;
        *) options="--kind --claimed" ;;
        esac
        ;;
    doctor) options="--config" ;;
    esac
    if [[ $cur == -* ]]; then
        COMPREPLY=($(compgen -W "$common $options" -- "$cur"))
        return
    fi

    case $command in
    "") COMPREPLY=($(compgen -W "status list show layers holders release sweep hold devices pr-helper monitor metrics doctor" -- "$cur")) ;;
    show | layers | hold)
        [[ -n $sub ]] || COMPREPLY=($(compgen -W "$(_hostctl_vms)" -- "$cur"))
        ;;
    release) COMPREPLY=($(compgen -W "$(_hostctl_vms)" -- "$cur")) ;;
    holders)
        if [[ -n $sub ]]; then
            COMPREPLY=($(compgen -W "$(_hostctl_layers "$sub")" -- "$cur"))
        else
            COMPREPLY=($(compgen -W "$(_hostctl_vms)" -- "$cur"))
        fi
        ;;
    devices)
        if [[ -z $sub ]]; then
            COMPREPLY=($(compgen -W "claim release" -- "$cur"))
        elif ((${#words[@]} == 3)); then
            # Devices are claimed for namespace/name, whose pod need not be there yet.
            COMPREPLY=($(compgen -W "$(_hostctl_vms | grep /)" -- "$cur"))
        fi
        ;;
    pr-helper) [[ -n $sub ]] || COMPREPLY=($(compgen -W "status enable disable restart probe" -- "$cur")) ;;
    esac
}

complete -F _hostctl hostctl
