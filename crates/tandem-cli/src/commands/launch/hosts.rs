//! Hosts of a launch: who has how many ranks, and the command that starts them there.

use std::path::Path;
use std::process::Command;

use anyhow::Context;

use crate::args::LaunchArguments;
use crate::exit::mistake;
use crate::shell::quote;

/// A machine that ssh reaches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Host {
    /// Name for ssh, perhaps with a user before it.
    pub(super) name: String,
    /// Ranks there.
    pub(super) ranks: usize,
}

impl Host {
    /// Returns the name without the user.
    pub(super) fn address(&self) -> &str {
        self.name.rsplit_once('@').map_or(&self.name, |(_, host)| host)
    }

    /// Returns the command that runs `tandem` with some words there, in this folder.
    pub(super) fn command(&self, ssh: &str, words: &[String]) -> anyhow::Result<Command> {
        let mut ssh = ssh.split_whitespace();
        let program = ssh.next().ok_or_else(|| mistake("--ssh is empty: give a command such as ssh"))?;
        let tandem = std::env::current_exe().context("cannot find this program")?;
        let folder = std::env::current_dir().context("cannot find this folder")?;
        let quoted: Vec<String> = words.iter().map(|word| quote(word)).collect();
        let script = format!(
            "cd {} && exec {} {}",
            quote(&folder.display().to_string()),
            quote(&tandem.display().to_string()),
            quoted.join(" ")
        );
        let mut command = Command::new(program);
        command.args(ssh).arg(&self.name).arg(script);
        Ok(command)
    }
}

/// Reads the hosts of a launch; none means this machine.
pub(super) fn read(arguments: &LaunchArguments) -> anyhow::Result<Vec<Host>> {
    let ranks = arguments.ranks;
    if ranks == Some(0) {
        return Err(mistake("-n 0: at least one rank"));
    }
    let hosts = match &arguments.hostfile {
        Some(path) => read_file(path, ranks)?,
        None => {
            let names = arguments.hosts.iter().map(|name| name.trim().to_owned());
            names.map(|name| Host { name, ranks: ranks.unwrap_or(1) }).collect()
        }
    };
    for (index, host) in hosts.iter().enumerate() {
        if host.name.is_empty() || host.name.starts_with('-') {
            return Err(mistake(format!("host {index} is {:?}, expected a name as ssh takes it", host.name)));
        }
        if hosts[..index].iter().any(|other| other.name == host.name) {
            return Err(mistake(format!("host {} is given twice; its ranks are one number", host.name)));
        }
    }
    Ok(hosts)
}

fn read_file(path: &Path, ranks: Option<usize>) -> anyhow::Result<Vec<Host>> {
    let text = tandem_files::read_text(path, tandem_files::MAX_CONFIG);
    let text = text.with_context(|| format!("--hostfile: cannot read {}", path.display()))?;
    let mut hosts = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default().trim();
        let mut words = line.split_whitespace();
        let Some(name) = words.next() else { continue };
        let number =
            |word: &str| word.strip_prefix("slots=")?.parse().ok().filter(|&number: &usize| number > 0);
        let slots = words.next().map(number);
        let place = || format!("{}:{}", path.display(), index + 1);
        let ranks = match (slots, ranks) {
            (Some(None), _) => {
                return Err(mistake(format!("{}: {line:?}, expected NAME or NAME slots=RANKS", place())));
            }
            _ if words.next().is_some() => {
                return Err(mistake(format!("{}: {line:?} has more than NAME slots=RANKS", place())));
            }
            (Some(Some(slots)), None) => slots,
            (None, Some(ranks)) => ranks,
            (None, None) => {
                return Err(mistake(format!("{}: {name} has no slots=RANKS; add it, or give -n", place())));
            }
            (Some(Some(_)), Some(_)) => {
                return Err(mistake(format!(
                    "{}: slots= and -n both say how many ranks; leave one out",
                    place()
                )));
            }
        };
        hosts.push(Host { name: name.to_owned(), ranks });
    }
    if hosts.is_empty() {
        return Err(mistake(format!("--hostfile: {} names no host", path.display())));
    }
    Ok(hosts)
}

/// Spreads so many ranks over the hosts that are left: the last ones give ranks up. `None` if they have
/// not so many.
pub(super) fn with_ranks(hosts: &[Host], lost: &[String], ranks: usize) -> Option<Vec<Host>> {
    let mut left = ranks;
    let mut some = Vec::new();
    for host in hosts.iter().filter(|host| !lost.contains(&host.name)) {
        let ranks = host.ranks.min(left);
        left -= ranks;
        if ranks > 0 {
            some.push(Host { name: host.name.clone(), ranks });
        }
    }
    (left == 0).then_some(some)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(name: &str, ranks: usize) -> Host {
        Host { name: name.to_owned(), ranks }
    }

    #[test]
    fn a_hostfile_has_a_host_per_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hosts");
        let read = |text: &str, ranks| {
            std::fs::write(&path, text).unwrap();
            read_file(&path, ranks).map_err(|error| error.to_string())
        };
        let hosts = read("# two\na slots=2\n\nme@b   slots=1 # last\n", None).unwrap();
        assert_eq!(hosts, [host("a", 2), host("me@b", 1)]);
        assert_eq!(hosts[1].address(), "b");
        assert_eq!(read("a\nb\n", Some(3)).unwrap(), [host("a", 3), host("b", 3)]);
        for (text, ranks, error) in [
            ("a slots=x", None, ":1: \"a slots=x\", expected NAME or NAME slots=RANKS"),
            ("\na slots=0", None, ":2: \"a slots=0\""),
            ("a slots=2 b", None, "more than NAME"),
            ("a", None, "a has no slots=RANKS"),
            ("a slots=2", Some(2), "both say how many ranks"),
            ("# none", None, "names no host"),
        ] {
            let found = read(text, ranks).unwrap_err();
            assert!(found.contains(error), "{text:?}: {found}");
        }
    }

    #[test]
    fn the_last_hosts_give_ranks_up() {
        let hosts = [host("a", 2), host("b", 2), host("c", 2)];
        let lost = ["a".to_owned()];
        assert_eq!(with_ranks(&hosts, &[], 3), Some(vec![host("a", 2), host("b", 1)]));
        assert_eq!(with_ranks(&hosts, &lost, 4), Some(vec![host("b", 2), host("c", 2)]));
        assert_eq!(with_ranks(&hosts, &lost, 5), None);
    }
}
