//! Layers that travel while others compute: they arrive whole, and a rank that is lost meanwhile is
//! missed.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tandem_comm::{CommError, ProcessGroup, threads};
use tandem_kernels::{DType, Device, MemoryKind};
use tandem_model::LayerId::{Block, Embedding, Head};
use tandem_model::{
    Decoder, FlatWeights, LayerId, LayerWeights, ModelError, ModelFolder, WeightSource, init,
};

use super::*;
use crate::TrainError;
use crate::parallel::Partition;
use crate::placement::OffloadedStorage;

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(600);
const DTYPES: [DType; 2] = [DType::F32, DType::Bf16];

fn cpu() -> Device {
    Device::cpu(1, 64 << 20).unwrap()
}

fn decoder() -> Arc<Decoder> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/small/model");
    Arc::new(Decoder::new(ModelFolder::open(&folder).unwrap().spec().clone(), 16).unwrap())
}

/// One rank's source.
fn sharded(device: &Device, decoder: &Arc<Decoder>, group: ProcessGroup, dtype: DType) -> ShardedWeights {
    placed(device, device, decoder, group, dtype)
}

/// One rank's source that keeps its part in the memory of `home`.
fn placed(
    device: &Device,
    home: &Device,
    decoder: &Arc<Decoder>,
    group: ProcessGroup,
    dtype: DType,
) -> ShardedWeights {
    let partition = Arc::new(Partition::new(decoder, group.rank(), group.size()));
    let whole = init::init(decoder, device, MemoryKind::Master, 7).unwrap().layers;
    let part = |(index, whole): (usize, tandem_kernels::Tensor)| {
        let owned = partition.owned(index);
        let mut part = home.alloc(MemoryKind::Master, 1, owned.len(), DType::F32).unwrap();
        if !device.is_meta() {
            part.view_mut().into_slice::<f32>().copy_from_slice(&whole.view().as_slice()[owned]);
        }
        part
    };
    let parts = FlatWeights { layers: whole.into_iter().enumerate().map(part).collect() };
    let away = (device.memory() != home.memory()).then(|| OffloadedStorage::new(home.clone()));
    ShardedWeights::new(device, decoder.clone(), partition, group, parts, away, dtype).unwrap()
}

/// Bytes that a layer reads: matmuls and look-ups.
fn content(decoder: &Decoder, layer: LayerId, weights: &LayerWeights<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for param in &decoder.layout(layer).params {
        bytes.extend_from_slice(weights.get(param.part).unwrap().as_bytes());
        if layer == Embedding {
            bytes.extend_from_slice(weights.precise(param.part).unwrap().as_bytes());
        }
    }
    bytes
}

/// [`content`] on one rank that holds everything.
fn expected(decoder: &Arc<Decoder>, layer: LayerId, dtype: DType) -> Vec<u8> {
    let device = cpu();
    let masters = init::init(decoder, &device, MemoryKind::Master, 7).unwrap();
    let mut whole = ReplicatedWeights::new(&device, decoder.clone(), masters, dtype).unwrap();
    content(decoder, layer, &whole.fetch(layer).unwrap())
}

fn comm(error: ModelError) -> CommError {
    TrainError::from(error).comm().expect("a rank is lost").clone()
}

/// Announced before they are fetched, as by a walk of two blocks there and back.
const WALK: [(&[LayerId], LayerId); 8] = [
    (&[Embedding, Block(0)], Embedding),
    (&[Block(1)], Block(0)),
    (&[Head], Block(1)),
    (&[], Head),
    (&[Block(1)], Head),
    (&[Block(0)], Block(1)),
    (&[], Block(0)),
    (&[Embedding, Block(0)], Embedding),
];

/// One thread plays all ranks, one after the other: it would wait for ever in a call that waits for
/// the others.
#[test]
fn what_was_announced_arrives_by_itself() {
    let decoder = decoder();
    for dtype in DTYPES {
        let devices = [cpu(), cpu(), cpu()];
        let groups = threads::groups(3, PATIENCE);
        let ranks = devices.iter().zip(groups);
        let mut ranks: Vec<_> = ranks.map(|(d, group)| sharded(d, &decoder, group, dtype)).collect();
        for (announced, layer) in WALK {
            for rank in &mut ranks {
                announced.iter().for_each(|layer| rank.prefetch(*layer).unwrap());
            }
            for rank in &mut ranks {
                let found = content(&decoder, layer, &rank.fetch(layer).unwrap());
                assert!(found == expected(&decoder, layer, dtype), "{layer} in {dtype}");
            }
        }
    }
}

#[test]
fn a_layer_is_whole_whatever_was_announced() {
    const TURNS: [(&[LayerId], LayerId); 9] = [
        (&[], Block(1)),
        (&[Head], Head),
        // Another than was announced; that one stays where it is until it is asked for.
        (&[Block(0)], Embedding),
        (&[Block(1)], Head),
        (&[], Block(0)),
        (&[], Block(1)),
        // Twice, and never asked for.
        (&[Head, Head], Head),
        (&[Embedding], Block(0)),
        (&[], Head),
    ];
    let decoder = decoder();
    for dtype in DTYPES {
        let rank = |group| {
            let device = cpu();
            let mut source = sharded(&device, &decoder, group, dtype);
            for (announced, layer) in TURNS {
                announced.iter().for_each(|layer| source.prefetch(*layer).unwrap());
                let found = content(&decoder, layer, &source.fetch(layer).unwrap());
                assert!(found == expected(&decoder, layer, dtype), "{layer} in {dtype}");
            }
            // What comes ahead is not what the masters have become.
            source.fetch(Embedding).unwrap();
            source.prefetch(Block(0)).unwrap();
            let masters = source.parts_mut();
            masters.layers[1].view_mut().into_slice::<f32>().fill(2.0);
            let changed = source.fetch(Block(0)).unwrap();
            let layout = decoder.layout(Block(0));
            let mut all = layout.params.iter().flat_map(|p| match changed.get(p.part).unwrap() {
                view if view.dtype() == DType::F32 => view.as_slice::<f32>().to_vec(),
                view => view.as_slice::<tandem_kernels::bf16>().iter().map(|x| x.to_f32()).collect(),
            });
            assert!(all.all(|x| x == 2.0));
        };
        std::thread::scope(|scope| {
            threads::groups(3, PATIENCE).into_iter().for_each(|group| drop(scope.spawn(move || rank(group))));
        });
    }
}

#[test]
fn one_rank_brings_layers_from_where_they_are_offloaded_to() {
    let decoder = decoder();
    let gathered = |device: &Device| device.memory().current[MemoryKind::Gathered as usize];
    for dtype in DTYPES {
        let (device, file) = (cpu(), tempfile::tempfile().unwrap());
        let home = device.in_file(&file, 16 << 20).unwrap();
        let mut source = placed(&device, &home, &decoder, ProcessGroup::alone(), dtype);
        assert_eq!((device.memory().total(), gathered(&home)), (0, 0));
        for (announced, layer) in WALK {
            announced.iter().for_each(|layer| source.prefetch(*layer).unwrap());
            let found = content(&decoder, layer, &source.fetch(layer).unwrap());
            assert!(found == expected(&decoder, layer, dtype), "{layer} in {dtype}");
        }
        // One is under way, and waited for before masters change.
        source.parts_mut();
        source.fetch(Head).unwrap();
        let one = gathered(&device);
        source.prefetch(Block(0)).unwrap();
        assert!(gathered(&device) > one, "there is room for two");
        source.parts_mut().layers[1].view_mut().into_slice::<f32>().fill(2.0);
        assert_eq!(gathered(&device), 0);
        let changed = source.fetch(Block(0)).unwrap();
        let part = decoder.layout(Block(0)).params[0].part;
        let bytes = changed.get(part).unwrap().as_bytes();
        let two = match dtype {
            DType::F32 => 2.0f32.to_ne_bytes().to_vec(),
            DType::Bf16 => tandem_kernels::bf16::from_f32(2.0).to_ne_bytes().to_vec(),
        };
        assert!(bytes.chunks_exact(two.len()).all(|bytes| bytes == two));
    }
}

#[test]
fn two_gathered_layers_are_in_memory_and_one_on_one_rank() {
    let decoder = decoder();
    let gathered = |device: &Device| device.memory().current[MemoryKind::Gathered as usize];
    for dtype in DTYPES {
        let alone = |layer| {
            let device = cpu();
            let mut source = sharded(&device, &decoder, ProcessGroup::alone(), dtype);
            source.prefetch(Head).unwrap();
            source.fetch(layer).unwrap();
            gathered(&device)
        };
        let rank = |group, device: Device| {
            let mut source = sharded(&device, &decoder, group, dtype);
            for (announced, layer) in WALK {
                announced.iter().for_each(|layer| source.prefetch(*layer).unwrap());
                source.fetch(layer).unwrap();
                let ahead = announced.last().filter(|ahead| **ahead != layer);
                let ahead = ahead.map_or(0, |layer| alone(*layer));
                assert_eq!(gathered(&device), alone(layer) + ahead, "{layer} in {dtype}");
            }
        };
        std::thread::scope(|scope| {
            let rank = &rank;
            threads::groups(2, PATIENCE)
                .into_iter()
                .for_each(|group| drop(scope.spawn(|| rank(group, cpu()))));
        });
        let (group, _log) = tandem_comm::recorder::group(1, 2);
        rank(group, Device::meta());
    }
}

#[test]
fn a_rank_that_is_lost_while_a_layer_is_on_its_way_is_missed_when_it_is_fetched() {
    let (decoder, device) = (decoder(), cpu());
    let pair = |patience| {
        let groups = threads::groups(2, patience).into_iter();
        let both: Vec<_> = groups.map(|group| sharded(&device, &decoder, group, DType::F32)).collect();
        <[_; 2]>::try_from(both).ok().unwrap()
    };
    let [mut a, b] = pair(PATIENCE);
    a.prefetch(Embedding).unwrap();
    drop(b);
    for _ in 0..2 {
        assert_eq!(comm(a.fetch(Embedding).err().unwrap()), CommError::PeerLost { rank: 1 });
    }
    // One that does not come.
    let [mut a, _b] = pair(Duration::from_millis(10));
    a.prefetch(Block(1)).unwrap();
    let error = comm(a.fetch(Block(1)).err().unwrap());
    assert!(matches!(&error, CommError::Deadline { missing, .. } if *missing == [1]), "{error}");
    // One that ends itself does not wait for what it has begun; the others complete that, and miss
    // it then.
    let [mut a, mut b] = pair(PATIENCE);
    a.prefetch(Embedding).unwrap();
    drop(a);
    assert!(b.fetch(Embedding).is_ok());
    assert_eq!(comm(b.fetch(Block(0)).err().unwrap()), CommError::PeerLost { rank: 0 });
}
