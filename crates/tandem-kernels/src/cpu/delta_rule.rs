//! Linear attention by the gated delta rule, token by token.
//!
//! Columns of a state do not depend on one another in the forward pass: a task has a block of columns
//! of one value head, small enough for the nearest cache, and walks over the tokens of one group of
//! runs. A token's output depends on its own text alone, and its operations are the same in training
//! and in generation.
//!
//! Backward, a task has one key head with all of its value heads. It computes the states once more,
//! keeps one every [`CHUNK`] tokens, and goes back chunk by chunk.

use super::Cpu;
use super::rows::RowsMut;
use super::scratch;
use super::vector::{for_lanes, vector_kernel};
use crate::batch::runs::{After, Runs};
use crate::ops::{DeltaRule, DeltaRuleBackward, DeltaShape};
use crate::{Element, View, with_element};

/// Columns of a block: a multiple of [`REGISTERS`] registers of every level.
const COLUMNS: usize = 64;
/// Registers of columns that a pass over the rows of a state sums in.
const REGISTERS: usize = 4;
/// Tokens from one kept state to the next in backward.
const CHUNK: usize = 32;

/// Gates of a token in one value head.
#[derive(Clone, Copy)]
struct Gates {
    /// `−exp(decay_log)`.
    rate: f32,
    /// `a + decay_bias`.
    step: f32,
    /// `g`.
    log_decay: f32,
    /// `e^g`.
    decay: f32,
    /// β.
    beta: f32,
}

fn sigmoid(x: f32) -> f32 {
    (1.0 / (1.0 + f64::from(-x).exp())) as f32
}

impl Gates {
    /// Computes the gates in f64, so that no library's last bits show.
    fn new(a: f32, b: f32, decay_log: f32, decay_bias: f32) -> Self {
        let rate = -f64::from(decay_log).exp() as f32;
        let step = a + decay_bias;
        let softplus = if step > 20.0 { step } else { f64::from(step).exp().ln_1p() as f32 };
        let log_decay = rate * softplus;
        Self { rate, step, log_decay, decay: f64::from(log_decay).exp() as f32, beta: sigmoid(b) }
    }
}

/// Returns of each run whether another one continues it.
fn continued(runs: &Runs) -> Vec<bool> {
    let mut continued = vec![false; runs.as_slice().len()];
    for run in runs.as_slice() {
        if let After::Run(before) = run.after {
            continued[before as usize] = true;
        }
    }
    continued
}

/// Returns the place of each run of a group among those that others continue, and their number.
fn places(group: &[usize], continued: &[bool]) -> (Vec<Option<usize>>, usize) {
    let mut count = 0;
    let place = |&run: &usize| {
        continued[run].then(|| {
            count += 1;
            count - 1
        })
    };
    (group.iter().map(place).collect(), count)
}

pub(crate) fn forward(cpu: &Cpu, call: DeltaRule) {
    let DeltaRule { q, k, v, a, b, decay_log, decay_bias, shape, runs, states, out } = call;
    let DeltaShape { key_heads, value_heads, key_dim, value_dim, scale } = *shape;
    let (rows, groups, continued) = (v.rows(), runs.groups(), continued(runs));
    let (logs, biases) = (decay_log.as_slice::<f32>(), decay_bias.as_slice::<f32>());
    let states = states.map(RowsMut::<f32>::new);
    let blocks = value_dim.div_ceil(COLUMNS);
    with_element!(v.dtype(), E => scratch::with_f32(rows * value_heads * 2, |gates| {
        let table = RowsMut::from_slice(gates);
        cpu.for_rows((rows, 64 * value_heads), |t| {
            // SAFETY: the gates of row `t` belong to this call alone.
            let gates = unsafe { table.part(0, t * value_heads * 2, value_heads * 2) };
            let (a, b) = (a.row::<E>(t), b.row::<E>(t));
            for (h, gate) in gates.chunks_exact_mut(2).enumerate() {
                let Gates { decay, beta, .. } = Gates::new(a[h].to_f32(), b[h].to_f32(), logs[h], biases[h]);
                gate.copy_from_slice(&[decay, beta]);
            }
        });
        let (gates, out) = (&*gates, RowsMut::<E>::new(out));
        cpu.parallel_for(groups.len() * value_heads * blocks, |task| {
            let (group, head, block) =
                (task / blocks / value_heads, task / blocks % value_heads, task % blocks);
            let group = &groups[group];
            let (places, num_places) = places(group, &continued);
            let key = head / (value_heads / key_heads) * key_dim;
            let first = block * COLUMNS;
            let width = COLUMNS.min(value_dim - first);
            let len = key_dim * COLUMNS;
            let slot_part = |slot: u32, row: usize| {
                let states = states.as_ref().expect("checked with the runs");
                let start = (head * key_dim + row) * value_dim + first;
                // SAFETY: these columns belong to this head and block alone, and no run keeps a slot
                // that another one reads.
                unsafe { states.part(slot as usize, start, width) }
            };
            scratch::with_f32((1 + num_places) * len, |memory| {
                let (state, ends) = memory.split_at_mut(len);
                for (index, &run) in group.iter().enumerate() {
                    let run = &runs.as_slice()[run];
                    match run.after {
                        After::Nothing => state.fill(0.0),
                        After::Run(before) => {
                            let place = group.binary_search(&(before as usize)).ok().and_then(|i| places[i]);
                            let place = place.expect("a run that another one continues");
                            state.copy_from_slice(&ends[place * len..][..len]);
                        }
                        After::Slot(slot) => {
                            state.fill(0.0);
                            for (row, state) in state.chunks_exact_mut(COLUMNS).enumerate() {
                                state[..width].copy_from_slice(slot_part(slot, row));
                            }
                        }
                    }
                    for t in run.rows.start as usize..run.rows.end as usize {
                        let gate = &gates[(t * value_heads + head) * 2..][..2];
                        let (q, k) = (&q.row::<f32>(t)[key..][..key_dim], &k.row::<f32>(t)[key..][..key_dim]);
                        let columns = head * value_dim + first;
                        let v = &v.row::<E>(t)[columns..][..width];
                        // SAFETY: these columns belong to this task alone; the state has a row for each
                        // element of a key; the level has V.
                        unsafe {
                            let out = out.part(t, columns, width);
                            advance::<E>(cpu.isa(), state, q, k, v, [gate[0], gate[1], scale], out);
                        }
                    }
                    if let Some(place) = places[index] {
                        ends[place * len..][..len].copy_from_slice(state);
                    }
                    if let Some(slot) = run.keep {
                        for (row, state) in state.chunks_exact(COLUMNS).enumerate() {
                            slot_part(slot, row).copy_from_slice(&state[..width]);
                        }
                    }
                }
            });
        });
    }));
}

vector_kernel! {
    /// Moves a block of columns of a state `[dk, COLUMNS]` by one token, and writes its output.
    unsafe fn advance<V: Vector, E: Element>(
        state: &mut [f32],
        q: &[f32],
        k: &[f32],
        v: &[E],
        gates: [f32; 3],
        out: &mut [E],
    ) {
        let mut start = 0;
        while start < v.len() {
            // SAFETY: a block has a whole number of groups of registers; of `v` and `out` no more is
            // read and written than there is.
            unsafe {
                let [decay, beta, scale] = gates.map(|gate| V::splat(gate));
                let column = |r: usize| start + r * V::LANES;
                let count = |r: usize| v.len().saturating_sub(column(r)).min(V::LANES);
                let state = state.as_mut_ptr();
                let mut sums = [V::splat(0.0); REGISTERS];
                for (i, k) in k.iter().enumerate() {
                    let k = V::splat(*k);
                    for r in 0..REGISTERS {
                        let place = state.add(i * COLUMNS + column(r));
                        let decayed = V::load(place, V::LANES).mul(decay);
                        decayed.store(place, V::LANES);
                        sums[r] = decayed.mul_add(k, sums[r]);
                    }
                }
                let mut delta = sums;
                for r in 0..REGISTERS {
                    let v = V::get(v.as_ptr().wrapping_add(column(r)), count(r));
                    delta[r] = v.sub(sums[r]).mul(beta);
                    sums[r] = V::splat(0.0);
                }
                for (i, (k, q)) in k.iter().zip(q).enumerate() {
                    let (k, q) = (V::splat(*k), V::splat(*q));
                    for r in 0..REGISTERS {
                        let place = state.add(i * COLUMNS + column(r));
                        let updated = delta[r].mul_add(k, V::load(place, V::LANES));
                        updated.store(place, V::LANES);
                        sums[r] = updated.mul_add(q, sums[r]);
                    }
                }
                for r in 0..REGISTERS {
                    sums[r].mul(scale).put(out.as_mut_ptr().wrapping_add(column(r)), count(r));
                }
            }
            start += REGISTERS * V::LANES;
        }
    }
}

pub(crate) fn backward(cpu: &Cpu, call: DeltaRuleBackward) {
    let DeltaRuleBackward { q, k, v, a, b, decay_log, decay_bias, shape, runs, d_out, .. } = call;
    let (groups, continued) = (runs.groups(), continued(runs));
    let heads = shape.value_heads / shape.key_heads;
    with_element!(v.dtype(), E => {
        let outputs = Outputs {
            dq: RowsMut::new(call.dq),
            dk: RowsMut::new(call.dk),
            dv: RowsMut::<E>::new(call.dv),
            da: RowsMut::<E>::new(call.da),
            db: RowsMut::<E>::new(call.db),
            d_decay_log: RowsMut::new(call.d_decay_log),
        };
        let (logs, biases) = (decay_log.as_slice::<f32>(), decay_bias.as_slice::<f32>());
        cpu.parallel_for(groups.len() * shape.key_heads, |task| {
            let (group, key_head) = (&groups[task / shape.key_heads], task % shape.key_heads);
            for head in key_head * heads..(key_head + 1) * heads {
                let pass = HeadPass::<E> {
                    cpu,
                    shape,
                    runs,
                    group,
                    operands: [q, k, v, d_out, a, b],
                    decay: [logs[head], biases[head]],
                    key_head,
                    head,
                    adds: head > key_head * heads,
                    outputs: &outputs,
                };
                pass.run(&continued);
            }
        });
    });
}

/// Gradients that backward writes.
struct Outputs<'a, E> {
    dq: RowsMut<'a, f32>,
    dk: RowsMut<'a, f32>,
    dv: RowsMut<'a, E>,
    da: RowsMut<'a, E>,
    db: RowsMut<'a, E>,
    d_decay_log: RowsMut<'a, f32>,
}

/// Backward of one value head over one group of runs.
struct HeadPass<'a, E> {
    cpu: &'a Cpu,
    shape: &'a DeltaShape,
    runs: &'a Runs,
    group: &'a [usize],
    /// `q`, `k`, `v`, `d_out`, `a`, `b`.
    operands: [View<'a>; 6],
    /// The head's `decay_log` and `decay_bias`.
    decay: [f32; 2],
    key_head: usize,
    head: usize,
    /// True if an earlier value head wrote `dq` and `dk` of this key head.
    adds: bool,
    outputs: &'a Outputs<'a, E>,
}

impl<E: Element> HeadPass<'_, E> {
    /// Columns of a state in memory.
    fn columns(&self) -> usize {
        self.shape.value_dim.next_multiple_of(COLUMNS)
    }

    fn key(&self, t: usize) -> &[f32] {
        let [_, k, ..] = &self.operands;
        &k.row::<f32>(t)[self.key_head * self.shape.key_dim..][..self.shape.key_dim]
    }

    fn query(&self, t: usize) -> &[f32] {
        let [q, ..] = &self.operands;
        &q.row::<f32>(t)[self.key_head * self.shape.key_dim..][..self.shape.key_dim]
    }

    fn gates(&self, t: usize) -> Gates {
        let [_, _, _, _, a, b] = &self.operands;
        let (a, b) = (a.row::<E>(t)[self.head].to_f32(), b.row::<E>(t)[self.head].to_f32());
        Gates::new(a, b, self.decay[0], self.decay[1])
    }

    /// Copies a token's columns of this head, as f32; the rest stays.
    fn read(&self, from: &View, t: usize, to: &mut [f32]) {
        let from = &from.row::<E>(t)[self.head * self.shape.value_dim..][..self.shape.value_dim];
        from.iter().zip(to).for_each(|(from, to)| *to = from.to_f32());
    }

    fn run(&self, continued: &[bool]) {
        let (dk, columns) = (self.shape.key_dim, self.columns());
        let len = dk * columns;
        let (places, num_places) = places(self.group, continued);
        let runs: Vec<_> = self.group.iter().map(|&run| &self.runs.as_slice()[run]).collect();
        let mut num_kept = 0;
        let first_kept: Vec<usize> = runs
            .iter()
            .map(|run| {
                num_kept += run.rows.len().div_ceil(CHUNK);
                num_kept - run.rows.len().div_ceil(CHUNK)
            })
            .collect();
        let place_before = |run: usize| match runs[run].after {
            After::Run(before) => {
                let index = self.group.binary_search(&(before as usize)).expect("in the same group");
                places[index]
            }
            After::Nothing | After::Slot(_) => None,
        };
        let states = num_kept + 2 * num_places + CHUNK + 2;
        scratch::with_f32(states * len + (CHUNK + 3) * columns + 2 * dk, |memory| {
            let (kept, memory) = memory.split_at_mut(num_kept * len);
            let (ends, memory) = memory.split_at_mut(num_places * len);
            let (d_ends, memory) = memory.split_at_mut(num_places * len);
            let (chunk, memory) = memory.split_at_mut(CHUNK * len);
            let (state, memory) = memory.split_at_mut(len);
            let (d_state, memory) = memory.split_at_mut(len);
            let (errors, vectors) = memory.split_at_mut(CHUNK * columns);
            vectors.fill(0.0);
            errors.fill(0.0);
            for (index, run) in runs.iter().enumerate() {
                match place_before(index) {
                    None => state.fill(0.0),
                    Some(place) => state.copy_from_slice(&ends[place * len..][..len]),
                }
                let first = run.rows.start as usize;
                for (nth, t) in (first..run.rows.end as usize).enumerate() {
                    if nth % CHUNK == 0 {
                        kept[(first_kept[index] + nth / CHUNK) * len..][..len].copy_from_slice(state);
                    }
                    self.decay_and_compare(t, None, state, &mut errors[..columns]);
                    self.update(t, &errors[..columns], state, &mut vectors[..columns]);
                }
                if let Some(place) = places[index] {
                    ends[place * len..][..len].copy_from_slice(state);
                }
            }
            d_ends.fill(0.0);
            for (index, run) in runs.iter().enumerate().rev() {
                match places[index] {
                    None => d_state.fill(0.0),
                    Some(place) => d_state.copy_from_slice(&d_ends[place * len..][..len]),
                }
                let rows = run.rows.start as usize..run.rows.end as usize;
                for nth in (0..rows.len().div_ceil(CHUNK)).rev() {
                    let start = rows.start + nth * CHUNK;
                    let tokens = start..rows.end.min(start + CHUNK);
                    let from = &kept[(first_kept[index] + nth) * len..][..len];
                    self.states_of_chunk(tokens.clone(), from, state, chunk, errors, &mut vectors[..columns]);
                    for t in tokens.rev() {
                        let own = t - start;
                        let (decayed, error) =
                            (&chunk[own * len..][..len], &errors[own * columns..][..columns]);
                        self.token_backward(t, decayed, error, d_state, vectors);
                    }
                }
                if let Some(place) = place_before(index) {
                    // SAFETY: both have `len` elements; the level has V.
                    unsafe { add(self.cpu.isa(), d_state, &mut d_ends[place * len..][..len]) };
                }
            }
        });
    }

    /// Computes the decayed states of a chunk's tokens, and `v − Sᵀk` of each, from the state before it.
    fn states_of_chunk(
        &self,
        tokens: std::ops::Range<usize>,
        before: &[f32],
        state: &mut [f32],
        chunk: &mut [f32],
        errors: &mut [f32],
        delta: &mut [f32],
    ) {
        let (len, columns) = (state.len(), self.columns());
        state.copy_from_slice(before);
        for (nth, t) in tokens.enumerate() {
            let error = &mut errors[nth * columns..][..columns];
            self.decay_and_compare(t, Some(&mut chunk[nth * len..][..len]), state, error);
            self.update(t, error, state, delta);
        }
    }

    /// Lets the state decay, perhaps copies it, and computes `v − Sᵀk`.
    fn decay_and_compare(&self, t: usize, copy: Option<&mut [f32]>, state: &mut [f32], error: &mut [f32]) {
        let [_, _, v, ..] = &self.operands;
        self.read(v, t, error);
        let copy = copy.unwrap_or_default();
        // SAFETY: a state has a row for each element of the key, of the error's length; `copy` is empty
        // or as long as the state; the level has V.
        unsafe { decay_and_compare(self.cpu.isa(), self.gates(t).decay, self.key(t), state, copy, error) };
        error[self.shape.value_dim..].fill(0.0);
    }

    /// Adds `k · (β · error)ᵀ`, and writes `β · error` into `delta`.
    fn update(&self, t: usize, error: &[f32], state: &mut [f32], delta: &mut [f32]) {
        let beta = self.gates(t).beta;
        delta.iter_mut().zip(error).for_each(|(delta, error)| *delta = beta * error);
        // SAFETY: a state has a row for each element of the key, of the length of `delta`; the level has
        // V.
        unsafe { add_outer(self.cpu.isa(), self.key(t), delta, state) };
    }

    /// Writes a token's gradients, and turns the gradient of the state after it into that before it.
    fn token_backward(
        &self,
        t: usize,
        decayed: &[f32],
        error: &[f32],
        d_state: &mut [f32],
        vectors: &mut [f32],
    ) {
        let (shape, columns, dk) = (self.shape, self.columns(), self.shape.key_dim);
        let Gates { rate, step, log_decay, decay, beta } = self.gates(t);
        let [_, _, _, d_out, ..] = &self.operands;
        let (own, keys) = vectors.split_at_mut(3 * columns);
        let (out, own) = own.split_at_mut(columns);
        let (delta, d_delta) = own.split_at_mut(columns);
        let (dq, dk_sums) = keys.split_at_mut(dk);
        self.read(d_out, t, out);
        out.iter_mut().for_each(|d_out| *d_out *= shape.scale);
        delta.iter_mut().zip(error).for_each(|(delta, error)| *delta = beta * error);
        d_delta.fill(0.0);
        // SAFETY: states have a row for each element of query and key, of the vectors' length; the
        // level has V.
        let d_log = unsafe {
            let (q, k) = (self.query(t), self.key(t));
            through_output(self.cpu.isa(), q, k, decayed, d_state, [&*out, &*delta], d_delta, dq, dk_sums);
            let d_beta: f32 = d_delta.iter().zip(error).map(|(d, error)| d * error).sum();
            let columns = self.head * shape.value_dim;
            let dv = self.outputs.dv.part(t, columns, shape.value_dim);
            dv.iter_mut().zip(&*d_delta).for_each(|(dv, d)| *dv = E::from_f32(beta * d));
            self.outputs.db.part(t, self.head, 1)[0] = E::from_f32(d_beta * beta * (1.0 - beta));
            d_delta.iter_mut().for_each(|d| *d *= -beta);
            through_error(self.cpu.isa(), k, decayed, d_state, d_delta, decay, dk_sums)
        };
        let start = self.key_head * dk;
        // SAFETY: these columns of the row belong to this task alone.
        unsafe {
            for (outputs, sums) in [(&self.outputs.dq, &*dq), (&self.outputs.dk, &*dk_sums)] {
                let gradient = outputs.part(t, start, dk);
                for (gradient, sum) in gradient.iter_mut().zip(sums) {
                    *gradient = if self.adds { *gradient + sum } else { *sum };
                }
            }
            self.outputs.da.part(t, self.head, 1)[0] = E::from_f32(d_log * rate * sigmoid(step));
            self.outputs.d_decay_log.part(t, self.head, 1)[0] = d_log * log_decay;
        }
    }
}

vector_kernel! {
    /// Computes `state ← decay · state`, copies it unless `copy` is empty, and `error ← error − stateᵀk`.
    unsafe fn decay_and_compare<V: Vector>(
        decay: f32,
        k: &[f32],
        state: &mut [f32],
        copy: &mut [f32],
        error: &mut [f32],
    ) {
        let columns = error.len();
        let (state, copies) = (state.as_mut_ptr(), !copy.is_empty());
        let copy = copy.as_mut_ptr();
        let mut start = 0;
        while start < columns {
            // SAFETY: columns are a whole number of groups of registers.
            unsafe {
                let decay = V::splat(decay);
                let mut sums = [V::splat(0.0); REGISTERS];
                for (i, k) in k.iter().enumerate() {
                    let k = V::splat(*k);
                    for r in 0..REGISTERS {
                        let place = i * columns + start + r * V::LANES;
                        let decayed = V::load(state.add(place), V::LANES).mul(decay);
                        decayed.store(state.add(place), V::LANES);
                        if copies {
                            decayed.store(copy.add(place), V::LANES);
                        }
                        sums[r] = decayed.mul_add(k, sums[r]);
                    }
                }
                for r in 0..REGISTERS {
                    let error = error.as_mut_ptr().add(start + r * V::LANES);
                    V::load(error, V::LANES).sub(sums[r]).store(error, V::LANES);
                }
            }
            start += REGISTERS * V::LANES;
        }
    }
}

vector_kernel! {
    /// Computes `state ← state + k deltaᵀ`.
    unsafe fn add_outer<V: Vector>(k: &[f32], delta: &[f32], state: &mut [f32]) {
        for (k, state) in k.iter().zip(state.chunks_exact_mut(delta.len())) {
            for_lanes!(V, delta.len(), |i, n| {
                // SAFETY: inside the rows.
                unsafe {
                    let state = state.as_mut_ptr().add(i);
                    let delta = V::load(delta.as_ptr().add(i), n);
                    delta.mul_add(V::splat(*k), V::load(state, n)).store(state, n);
                }
            });
        }
    }
}

vector_kernel! {
    /// Goes back through `o = Sᵀq` and `S = S′ + k δᵀ`, with `[do, δ]`: adds `q doᵀ` to `d_state`, writes
    /// `dq`, and `dS δ` into `dk`, and adds `dSᵀk` to `d_delta`.
    unsafe fn through_output<V: Vector>(
        q: &[f32],
        k: &[f32],
        decayed: &[f32],
        d_state: &mut [f32],
        vectors: [&[f32]; 2],
        d_delta: &mut [f32],
        dq: &mut [f32],
        dk: &mut [f32],
    ) {
        let [d_out, delta] = vectors;
        let columns = d_out.len();
        // SAFETY: columns are a whole number of registers, and every row has them.
        unsafe {
            let mut both = V::splat(0.0);
            for_lanes!(V, columns, |c, n| {
                both = V::load(d_out.as_ptr().add(c), n).mul_add(V::load(delta.as_ptr().add(c), n), both);
            });
            let both = both.sum();
            for i in 0..k.len() {
                let (qi, ki) = (V::splat(q[i]), V::splat(k[i]));
                let (decayed, d_state) = (decayed.as_ptr().add(i * columns), d_state.as_mut_ptr().add(i * columns));
                let (mut dq_sum, mut dk_sum) = (V::splat(0.0), V::splat(0.0));
                for_lanes!(V, columns, |c, n| {
                    let d_out = V::load(d_out.as_ptr().add(c), n);
                    let d = d_out.mul_add(qi, V::load(d_state.add(c), n));
                    d.store(d_state.add(c), n);
                    dq_sum = V::load(decayed.add(c), n).mul_add(d_out, dq_sum);
                    dk_sum = d.mul_add(V::load(delta.as_ptr().add(c), n), dk_sum);
                    let d_delta = d_delta.as_mut_ptr().add(c);
                    d.mul_add(ki, V::load(d_delta, n)).store(d_delta, n);
                });
                dq[i] = dq_sum.sum() + k[i] * both;
                dk[i] = dk_sum.sum();
            }
        }
    }
}

vector_kernel! {
    /// Goes back through `δ = β (v − S′ᵀk)` and the decay, with the gradient `dm` of `S′ᵀk`: adds `S′ dm`
    /// to `dk`, turns `d_state` into the gradient of the state before the token, and returns the
    /// gradient of the logarithm of the decay.
    unsafe fn through_error<V: Vector>(
        k: &[f32],
        decayed: &[f32],
        d_state: &mut [f32],
        dm: &[f32],
        decay: f32,
        dk: &mut [f32],
    ) -> f32 {
        let columns = dm.len();
        // SAFETY: columns are a whole number of registers, and every row has them.
        unsafe {
            let (mut d_log, decay) = (V::splat(0.0), V::splat(decay));
            for i in 0..k.len() {
                let ki = V::splat(k[i]);
                let (decayed, d_state) = (decayed.as_ptr().add(i * columns), d_state.as_mut_ptr().add(i * columns));
                let mut dk_sum = V::splat(0.0);
                for_lanes!(V, columns, |c, n| {
                    let (dm, decayed) = (V::load(dm.as_ptr().add(c), n), V::load(decayed.add(c), n));
                    let d = dm.mul_add(ki, V::load(d_state.add(c), n));
                    dk_sum = decayed.mul_add(dm, dk_sum);
                    d_log = decayed.mul_add(d, d_log);
                    d.mul(decay).store(d_state.add(c), n);
                });
                dk[i] += dk_sum.sum();
            }
            d_log.sum()
        }
    }
}

vector_kernel! {
    unsafe fn add<V: Vector>(x: &[f32], to: &mut [f32]) {
        for_lanes!(V, x.len(), |i, n| {
            // SAFETY: both have one length.
            unsafe {
                let place = to.as_mut_ptr().add(i);
                V::load(x.as_ptr().add(i), n).add(V::load(place, n)).store(place, n);
            }
        });
    }
}
