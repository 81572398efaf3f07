//! Links between GPUs in as few lines as possible.

use tandem_kernels::cuda::nvidia::{Link, Links};

/// Returns one line if all pairs are alike, else one per GPU; none without a pair.
pub(crate) fn lines(links: &Links) -> Vec<(String, String)> {
    let count = links.from.len();
    let kinds: Vec<Link> = kinds(links.from.iter().flatten());
    let unknown =
        links.unknown.as_ref().map(|why| format!("; whether NVLink joins them is not known: {why}"));
    let unknown = unknown.unwrap_or_default();
    match kinds[..] {
        [] => Vec::new(),
        [kind] => {
            vec![("links".to_owned(), format!("each of {count} GPUs to each other: {}{unknown}", name(kind)))]
        }
        _ => {
            let rows = links.from.iter().enumerate();
            let line =
                |(ordinal, row): (usize, &Vec<Option<Link>>)| (format!("links {ordinal}"), to_others(row));
            let mut lines: Vec<(String, String)> = rows.map(line).collect();
            lines[0].1 += &unknown;
            lines
        }
    }
}

/// Formats links by kind: "NVLink to 1, 2, 3; peer access over PCIe to 4".
fn to_others(row: &[Option<Link>]) -> String {
    let to = |kind: Link| {
        let reached = row.iter().enumerate().filter(|(_, link)| **link == Some(kind));
        let reached: Vec<String> = reached.map(|(ordinal, _)| ordinal.to_string()).collect();
        format!("{} to {}", name(kind), reached.join(", "))
    };
    kinds(row.iter()).into_iter().map(to).collect::<Vec<_>>().join("; ")
}

/// Kinds of link in order of appearance.
fn kinds<'a>(links: impl Iterator<Item = &'a Option<Link>>) -> Vec<Link> {
    let mut kinds = Vec::new();
    for &link in links.flatten() {
        if !kinds.contains(&link) {
            kinds.push(link);
        }
    }
    kinds
}

fn name(link: Link) -> &'static str {
    match (link.access, link.nvlink) {
        (true, Some(true)) => "NVLink",
        (true, Some(false)) => "peer access over PCIe",
        (true, None) => "peer access",
        (false, Some(true)) => "NVLink, but no peer access",
        (false, _) => "no peer access, numbers go through host memory",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// N by an NVLink, P by the bus, H by nothing, ? by something unknown.
    fn links(rows: &[&str], unknown: Option<&str>) -> Links {
        let link = |text: char| match text {
            'N' => Some(Link { access: true, nvlink: Some(true) }),
            'P' => Some(Link { access: true, nvlink: Some(false) }),
            'H' => Some(Link { access: false, nvlink: Some(false) }),
            '?' => Some(Link { access: true, nvlink: None }),
            _ => None,
        };
        let from = rows.iter().map(|row| row.chars().map(link).collect()).collect();
        Links { from, unknown: unknown.map(str::to_owned) }
    }

    fn said(rows: &[&str], unknown: Option<&str>) -> Vec<String> {
        lines(&links(rows, unknown)).into_iter().map(|(what, found)| format!("{what}: {found}")).collect()
    }

    #[test]
    fn pairs_that_are_alike_are_one_line() {
        assert!(said(&[], None).is_empty() && said(&["-"], None).is_empty());
        assert_eq!(said(&["-N", "N-"], None), ["links: each of 2 GPUs to each other: NVLink"]);
        assert_eq!(
            said(&["-HH", "H-H", "HH-"], None),
            ["links: each of 3 GPUs to each other: no peer access, numbers go through host memory"]
        );
        assert_eq!(
            said(&["-?", "?-"], Some("NVML cannot be used")),
            [
                "links: each of 2 GPUs to each other: peer access; whether NVLink joins them is not known: NVML cannot be used"
            ]
        );
    }

    #[test]
    fn pairs_that_differ_are_a_line_for_each_gpu() {
        assert_eq!(
            said(&["-NPP", "N-PP", "PP-N", "PPN-"], None),
            [
                "links 0: NVLink to 1; peer access over PCIe to 2, 3",
                "links 1: NVLink to 0; peer access over PCIe to 2, 3",
                "links 2: peer access over PCIe to 0, 1; NVLink to 3",
                "links 3: peer access over PCIe to 0, 1; NVLink to 2",
            ]
        );
    }
}
