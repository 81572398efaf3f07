//! How GPUs are joined.

use crate::cuda::failed;
use crate::cuda::nvidia::Link;
use crate::cuda::nvidia::fake::{Fake, Kind, UNKNOWN, nvml};
use crate::cuda::nvidia::links::links_of;

/// GPUs of these boards and bridges.
fn gpus<const N: usize>(places: [(u32, u32); N]) -> [usize; N] {
    places.map(|(board, bridge)| Fake::new(Kind { board, bridge, ..Kind::default() }).ordinal)
}

#[test]
fn each_gpu_is_asked_about_each_other() {
    let ordinals = gpus([(1, 1), (1, 1), (1, 0), (2, 2)]);
    let links = links_of(&Fake::cuda().unwrap(), &ordinals, nvml()).unwrap();
    let link = |access, nvlink| Some(Link { access, nvlink: Some(nvlink) });
    let (near, bus, far) = (link(true, true), link(true, false), link(false, false));
    assert_eq!(
        links.from,
        [[None, near, bus, far], [near, None, bus, far], [bus, bus, None, far], [far, far, far, None]]
    );
    assert_eq!(links.unknown, None);
}

#[test]
fn what_nvml_does_not_tell_is_not_known() {
    let cuda = Fake::cuda().unwrap();
    let ordinals = gpus([(1, UNKNOWN), (1, UNKNOWN)]);
    let known = Some(Link { access: true, nvlink: None });
    let links = links_of(&cuda, &ordinals, nvml()).unwrap();
    assert_eq!(links.from, [[None, known], [known, None]]);
    assert_eq!(links.unknown.as_deref(), Some("NVML: asking for NVLink: Not Supported"));
    let links = links_of(&cuda, &ordinals, Err(failed("NVML", "there is none"))).unwrap();
    assert_eq!(links.from, [[None, known], [known, None]]);
    assert_eq!(links.unknown.as_deref(), Some("NVML cannot be used"));
}
