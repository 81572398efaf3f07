//! Choice of algorithms by time, over a stand-in for cuBLASLt whose products take the time that a test
//! says.

use std::fs;
use std::path::Path;

use crate::DType;
use crate::cuda::autotune::{Autotuner, CANDIDATES, Choice};
use crate::cuda::driver::{Algorithm, Drivers, Factor, FactorType, Matmul, MatmulChoice};
use crate::cuda::nvidia::cache::Cache;
use crate::cuda::nvidia::fake::{Fake, Kind, computed, num_chosen, num_described, offer_algorithms};

fn product(size: [usize; 3]) -> Matmul {
    let [_, n, k] = size;
    let factor = |address, stride| Factor { address, stride, along_depth: true };
    Matmul {
        size,
        dtype: FactorType::Bf16,
        a: factor(1 << 20, k),
        b: factor(1 << 20, k),
        c: None,
        d: (1 << 20, n),
        d_type: DType::F32,
        tf32: false,
    }
}

/// Number of the algorithm of a choice.
fn number(choice: &Choice) -> usize {
    match choice {
        Choice::Chosen(MatmulChoice { algorithm, .. }) => (algorithm.0[7] >> 48) as usize,
        other => panic!("{other:?}"),
    }
}

fn choose(driver: &Drivers, product: &Matmul) -> Choice {
    Autotuner::new(driver.clone(), &[*product]).unwrap().choose(product).unwrap()
}

/// Multiplies the shape on scratch memory, and returns the number of the algorithm.
fn multiply(driver: &Drivers, product: &Matmul) -> usize {
    let stream = driver.new_stream().unwrap();
    let region = driver.reserve(1 << 22).unwrap();
    region.grow(1 << 22).unwrap();
    computed();
    // SAFETY: the operands lie in the region.
    unsafe { driver.matmul(stream, &product.placed(region.base()).0).unwrap() };
    driver.end_stream(stream);
    let computed = computed();
    assert_eq!(computed.len(), 1);
    computed[0]
}

fn files(folder: &Path) -> Vec<std::path::PathBuf> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn the_fastest_algorithm_is_chosen_and_used_for_all_numbers_of_tokens_that_are_rounded_to_it() {
    let described = num_described();
    let folder = tempfile::tempdir().unwrap();
    let fake = Fake::new(Kind::default());
    {
        let driver = fake.open_with(Cache::at(folder.path())).unwrap();
        offer_algorithms(&[400, 390, 100, 100, 5000]);
        let own = product([33, 16, 24]);
        computed();
        let choice = choose(&driver, &own);
        assert_eq!(number(&choice), 2);
        let mut runs = [0; 5];
        computed().into_iter().for_each(|number| runs[number] += 1);
        assert_eq!(runs, [8, 2, 8, 8, 2], "far slower ones are timed once; the first is compared with");
        let Choice::Chosen(choice) = choice else { unreachable!() };
        assert_eq!(multiply(&driver, &own), 0, "before it is set");
        driver.set_choices(&[choice]);
        for tokens in [33, 40, 36] {
            assert_eq!(multiply(&driver, &product([tokens, 16, 24])), 2);
        }
        assert_eq!(multiply(&driver, &product([41, 16, 24])), 0, "another shape");
        driver.set_choices(&[]);
        assert_eq!(multiply(&driver, &own), 0);
    }
    assert_eq!((fake.held(), num_described()), ([0; 8], described), "everything is given back");
}

#[test]
fn a_small_difference_keeps_the_first_and_no_more_than_asked_for_are_timed() {
    let folder = tempfile::tempdir().unwrap();
    let driver = Fake::new(Kind::default()).open_with(Cache::at(folder.path())).unwrap();
    offer_algorithms(&[1000, 990]);
    assert_eq!(number(&choose(&driver, &product([8, 16, 24]))), 0);
    let mut times = vec![1000; CANDIDATES + 1];
    times[CANDIDATES - 1] = 500;
    times[CANDIDATES] = 10;
    offer_algorithms(&times);
    assert_eq!(number(&choose(&driver, &product([8, 16, 40]))), CANDIDATES - 1);
}

#[test]
fn a_choice_is_read_again_without_timing_by_another_process() {
    let folder = tempfile::tempdir().unwrap();
    let cache = || Cache::at(folder.path());
    let own = product([33, 16, 24]);
    offer_algorithms(&[400, 100]);
    let driver = Fake::new(Kind::default()).open_with(cache()).unwrap();
    let first = choose(&driver, &own);
    assert_eq!(number(&first), 1);
    // Now the first would win.
    offer_algorithms(&[100, 400]);
    let again = Fake::new(Kind::default()).open_with(cache()).unwrap();
    computed();
    let before = num_chosen();
    assert_eq!(choose(&again, &own), first);
    assert_eq!((computed().len(), num_chosen()), (0, before), "nothing is timed");
    assert_eq!(number(&choose(&again, &product([41, 16, 24]))), 0, "another shape");
    let other = Fake::new(Kind { capability: (9, 0), ..Kind::default() }).open_with(cache()).unwrap();
    assert_eq!(number(&choose(&other, &own)), 0, "another kind of GPU");
    assert_eq!(files(folder.path()).len(), 3, "and no temporary file stays");
}

#[test]
fn a_damaged_choice_is_made_anew() {
    let folder = tempfile::tempdir().unwrap();
    let driver = Fake::new(Kind::default()).open_with(Cache::at(folder.path())).unwrap();
    let own = product([33, 16, 24]);
    offer_algorithms(&[400, 100]);
    choose(&driver, &own);
    let path = files(folder.path()).remove(0);
    let whole = fs::read(&path).unwrap();
    let mut changed = whole.clone();
    changed[60] ^= 1;
    offer_algorithms(&[100, 400]);
    for damaged in [&whole[..whole.len() / 2], b"", &changed[..]] {
        fs::write(&path, damaged).unwrap();
        assert_eq!(number(&choose(&driver, &own)), 0);
        assert_eq!(number(&choose(&driver, &own)), 0, "read again");
        assert_eq!(files(folder.path()).len(), 1);
    }
}

#[test]
fn of_two_processes_that_time_at_once_both_take_the_choice_of_one() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path());
    let choice = |number| MatmulChoice { shape: "a shape".to_owned(), algorithm: Algorithm([number; 8]) };
    let kept = cache.keep_algorithm("a GPU", &choice(1));
    assert_eq!(kept, Some(Algorithm([1; 8])));
    assert_eq!(cache.keep_algorithm("a GPU", &choice(2)), kept, "the second takes the first one's");
    let all: Vec<_> = std::thread::scope(|scope| {
        let keep = |number| {
            let choice = MatmulChoice { shape: "another".to_owned(), ..choice(number) };
            cache.keep_algorithm("a GPU", &choice)
        };
        let threads: Vec<_> = (0..8).map(|number| scope.spawn(move || keep(number))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(all[0].is_some() && all.iter().all(|kept| *kept == all[0]), "{all:?}");
    assert_eq!(files(folder.path()).len(), 2);
}

#[test]
fn what_cannot_be_kept_is_not_chosen() {
    offer_algorithms(&[400, 100]);
    let own = product([33, 16, 24]);
    let without = Fake::new(Kind::default()).open();
    assert_eq!(choose(&without, &own), Choice::NotKept);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "no folder").unwrap();
    let driver = Fake::new(Kind::default()).open_with(Cache::at(&file)).unwrap();
    assert_eq!(choose(&driver, &own), Choice::NotKept);
}

#[test]
fn an_algorithm_of_another_library_is_refused_and_does_no_harm() {
    let driver = Fake::new(Kind::default()).open();
    offer_algorithms(&[400, 100]);
    let own = product([40, 16, 24]);
    let algorithms = driver.algorithms(&own, CANDIDATES).unwrap();
    assert!(algorithms.iter().all(|algorithm| driver.accepts(&own, algorithm).unwrap()));
    // This one offers fewer.
    offer_algorithms(&[400]);
    assert!(!driver.accepts(&own, &algorithms[1]).unwrap());
    driver.set_choices(&[MatmulChoice { shape: own.key(), algorithm: algorithms[1] }]);
    assert_eq!(multiply(&driver, &own), 0);
}
