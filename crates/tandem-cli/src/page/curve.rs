//! Curves of metrics: fewer points for a picture, and a mean of neighbours.

/// A point: step, and value; a value that is no number leaves a gap.
pub(crate) type Point = (f64, f64);

/// Returns the least and the largest value of each bucket, and its first gap if it has one, in order: at most about
/// `2 * buckets` points and the gaps.
pub(crate) fn downsampled(points: &[Point], buckets: usize) -> Vec<Point> {
    if points.len() <= 2 * buckets {
        return points.to_vec();
    }
    let size = points.len().div_ceil(buckets);
    let mut kept = Vec::with_capacity(2 * buckets);
    for bucket in points.chunks(size) {
        let numbers = || bucket.iter().enumerate().filter(|(_, point)| point.1.is_finite());
        let least = numbers().min_by(|a, b| a.1.1.total_cmp(&b.1.1)).map(|(index, _)| index);
        let largest = numbers().max_by(|a, b| a.1.1.total_cmp(&b.1.1)).map(|(index, _)| index);
        let gap = bucket.iter().position(|point| !point.1.is_finite());
        let mut places: Vec<usize> = [least, largest, gap].into_iter().flatten().collect();
        places.sort_unstable();
        places.dedup();
        kept.extend(places.into_iter().map(|place| bucket[place]));
    }
    kept
}

/// Returns the mean of each point and of its neighbours up to `reach` points away. The first points have as
/// many on either side as there are before them: a curve that begins with a fall begins where it did.
pub(crate) fn smoothed(points: &[Point], reach: usize) -> Vec<Point> {
    let mut sums = Vec::with_capacity(points.len() + 1);
    sums.push((0.0, 0usize));
    for (_, value) in points {
        let (sum, count) = sums[sums.len() - 1];
        sums.push(if value.is_finite() { (sum + value, count + 1) } else { (sum, count) });
    }
    let mean = |index: usize| {
        let reach = reach.min(index);
        let (from, to) = (sums[index - reach], sums[(index + reach + 1).min(points.len())]);
        (to.0 - from.0) / (to.1 - from.1) as f64
    };
    // A gap stays one.
    let smooth = |(index, (step, value)): (usize, &Point)| {
        (*step, if value.is_finite() { mean(index) } else { f64::NAN })
    };
    points.iter().enumerate().map(smooth).collect()
}

/// Returns whether a curve goes up and down from point to point.
pub(crate) fn is_noisy(points: &[Point]) -> bool {
    let rise = |pair: &[Point]| pair[1].1 - pair[0].1;
    let turns = points.windows(3).filter(|three| rise(&three[..2]) * rise(&three[1..]) < 0.0).count();
    5 * turns > points.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fewer_points_keep_every_extreme_and_the_order() {
        let mut points: Vec<Point> =
            (0..10_000).map(|i| (f64::from(i), (f64::from(i) * 0.37).sin())).collect();
        points[1234].1 = 50.0;
        points[9999].1 = -50.0;
        points[0].1 = 20.0;
        let kept = downsampled(&points, 300);
        assert!(kept.len() <= 600, "{} points", kept.len());
        assert!(kept.is_sorted_by(|a, b| a.0 < b.0));
        for index in [0, 1234, 9999] {
            assert!(kept.contains(&points[index]), "the extreme at {index} is lost");
        }
        assert_eq!(downsampled(&points[..600], 300), points[..600], "few points stay as they are");
    }

    #[test]
    fn a_bucket_without_numbers_stays_a_gap() {
        let points: Vec<Point> =
            (0..100).map(|i| (f64::from(i), if i < 50 { 1.0 } else { f64::NAN })).collect();
        let kept = downsampled(&points, 10);
        assert_eq!(kept.iter().filter(|point| point.1.is_nan()).count(), 5);
        let mut points: Vec<Point> = (0..100).map(|i| (f64::from(i), f64::from(i))).collect();
        points[42].1 = f64::NAN;
        let kept = downsampled(&points, 10);
        assert_eq!(kept.iter().filter(|point| point.1.is_nan()).count(), 1, "so does a gap among numbers");
        assert!(kept.is_sorted_by(|a, b| a.0 < b.0));
    }

    #[test]
    fn a_mean_of_neighbours_keeps_a_line_and_skips_what_is_no_number() {
        let line: Vec<Point> = (0..50).map(|i| (f64::from(i), 2.0 * f64::from(i))).collect();
        let means = smoothed(&line, 7);
        assert_eq!(
            (means.len(), means[0].1, means[49].1),
            (50, 0.0, 91.0),
            "no mean at the start, one of eight points at the end"
        );
        for (mean, point) in means.iter().zip(&line).take(43) {
            assert!((mean.1 - point.1).abs() < 1e-9, "{mean:?} of {point:?}");
        }
        let gap = [(0.0, 1.0), (1.0, f64::NAN), (2.0, 3.0)];
        let means = smoothed(&gap, 1);
        assert!(means[1].1.is_nan() && means[2].1 == 3.0, "{means:?}");
    }

    #[test]
    fn a_schedule_is_no_noise() {
        let curve = |value: fn(f64) -> f64| -> Vec<Point> {
            (0..500).map(|i| (f64::from(i), value(f64::from(i)))).collect()
        };
        assert!(!is_noisy(&curve(|x| (x / 100.0).cos())) && !is_noisy(&curve(|_| 3.0)));
        assert!(is_noisy(&curve(|x| (x * 1.7).cos())));
    }
}
