package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;

import java.util.List;
import org.junit.jupiter.api.Test;

/** Optimizers over tensors, against one step computed by hand. */
class OptimizerTest {
    private final Tensor weight = Tensor.copyOf(new float[] {1f, -2f});
    private final Tensor grad = Tensor.copyOf(new float[] {0.5f, 0.25f});
    private final Params params = Params.of("w", weight);

    private void expect(double... values) {
        for (int i = 0; i < values.length; ++i) {
            assertEquals(values[i], weight.floats().get(i), 1e-6, "element " + i);
        }
    }

    @Test
    void sgdWithMomentumAndNesterov() {
        try (Optimizer sgd = Optimizer.sgd(params, List.of(grad)).lr(0.1).momentum(0.9).weightDecay(0).dampening(0)
                .nesterov(true).build()) {
            sgd.step();
            expect(1 - 0.1 * (0.5 + 0.9 * 0.5), -2 - 0.1 * (0.25 + 0.9 * 0.25));
            assertEquals(1, sgd.steps());
            sgd.zeroGrad();
            assertEquals(0f, grad.floats().get(0));
        }
    }

    @Test
    void adamMovesByTheRateAtFirst() {
        try (Optimizer adam = Optimizer.adam(params, List.of(grad)).lr(0.1).betas(0.9, 0.999).eps(1e-8).build()) {
            adam.step();
            expect(0.9, -2.1);
        }
    }

    @Test
    void adamWDecaysByItself() {
        try (Optimizer adamW = Optimizer.adamW(params, List.of(grad)).lr(0.1).weightDecay(0.5).build()) {
            adamW.step();
            expect(1 * (1 - 0.1 * 0.5) - 0.1, -2 * (1 - 0.1 * 0.5) - 0.1);
        }
    }

    @Test
    void adagradDividesByTheRootOfSummedSquares() {
        try (Optimizer adagrad = Optimizer.adagrad(params, List.of(grad)).lr(0.1).lrDecay(0.5).weightDecay(0)
                .initialAccumulatorValue(0.25).eps(1e-6).build()) {
            adagrad.step();
            adagrad.step();
            double[] expected = {1, -2};
            for (int i = 0; i < 2; ++i) {
                final double g = grad.floats().get(i);
                expected[i] -= 0.1 * g / (Math.sqrt(0.25 + g * g) + 1e-6);
                expected[i] -= 0.1 / 1.5 * g / (Math.sqrt(0.25 + 2 * g * g) + 1e-6);
            }
            expect(expected);
        }
    }

    @Test
    void lionMovesByTheRateAgainstTheSign() {
        try (Optimizer lion = Optimizer.lion(params, List.of(grad)).lr(0.125).betas(0.5, 0.5).weightDecay(0.5).build()) {
            lion.step();
            expect(1 - 0.125 * 0.5 - 0.125, -2 + 0.125 * 0.5 * 2 - 0.125);
            lion.zeroGrad();
            grad.floats().put(0, -1f);
            lion.step();
            expect(0.8125 * (1 - 0.125 * 0.5) + 0.125, -2 * (1 - 0.125 * 0.5) - 0.125);
        }
    }

    @Test
    void lambScalesByTheTrustRatio() {
        try (Optimizer lamb = Optimizer.lamb(params, List.of(grad)).lr(0.1).betas(0, 0).eps(0).weightDecay(0)
                .biasCorrection(false).maxCoeff(10).minCoeff(0.01).build()) {
            lamb.step();
            final double ratio = Math.hypot(1, 2) / Math.hypot(1, 1);
            expect(1 - 0.1 * ratio, -2 - 0.1 * ratio);
        }
    }

    @Test
    void theCpuHasOneStream() {
        try (Optimizer sgd = Optimizer.sgd(params, List.of(grad)).lr(1).build()) {
            sgd.setStream(0);
            assertThrows(TesseraInvalidArgumentException.class, () -> sgd.setStream(1));
        }
    }

    @Test
    void gradientsAreBoundedByTheirNorm() {
        try (Optimizer sgd = Optimizer.sgd(params, List.of(grad)).lr(1).build()) {
            assertEquals(Math.hypot(0.5, 0.25), sgd.clipGradNorm(10), 1e-7);
            assertEquals(0.5f, grad.floats().get(0), "it is below");
            assertEquals(0.75, sgd.clipGradNorm(10, 1), 1e-7);
            assertEquals(0.5, sgd.clipGradNorm(0.25, Double.POSITIVE_INFINITY), 1e-7);
            assertEquals(0.25, grad.floats().get(0), 1e-6);
            assertEquals(0.125, grad.floats().get(1), 1e-6);
            sgd.clipGradValue(0.2);
            assertEquals(0.2f, grad.floats().get(0));
            grad.floats().put(1, Float.NaN);
            assertEquals(Double.POSITIVE_INFINITY, sgd.clipGradNorm(0.1));
            assertEquals(0.2f, grad.floats().get(0), "left as they are");
            for (double bad : new double[] {-1, Double.NaN, Double.POSITIVE_INFINITY}) {
                assertThrows(TesseraInvalidArgumentException.class, () -> sgd.clipGradNorm(bad));
                assertThrows(TesseraInvalidArgumentException.class, () -> sgd.clipGradValue(bad));
            }
            assertThrows(TesseraInvalidArgumentException.class, () -> sgd.clipGradNorm(1, 0.5));
        }
    }

    @Test
    void defaultsAreTheLibrarys() {
        try (Optimizer adamW = Optimizer.adamW(params, List.of(grad)).build();
                Optimizer adam = Optimizer.adam(params, List.of(grad)).build();
                Optimizer adagrad = Optimizer.adagrad(params, List.of(grad)).build();
                Optimizer lion = Optimizer.lion(params, List.of(grad)).build();
                Optimizer lamb = Optimizer.lamb(params, List.of(grad)).build();
                Optimizer sgd = Optimizer.sgd(params, List.of(grad)).build()) {
            assertEquals(1e-3, lamb.lr());
            assertEquals(1e-4, lion.lr());
            assertEquals(1e-2, adagrad.lr());
            assertEquals(1e-3, adamW.lr());
            assertEquals(1e-3, adam.lr());
            assertEquals(1e-3, sgd.lr());
            sgd.setLr(0.5);
            assertEquals(0.5, sgd.lr());
            sgd.step();
            expect(1 - 0.5 * 0.5, -2 - 0.5 * 0.25);
        }
    }

    @Test
    void badSettingsAndTensorsAreRefused() {
        assertThrows(IllegalArgumentException.class, () -> Optimizer.sgd(params, List.of()));
        assertThrows(TesseraInvalidArgumentException.class,
                () -> Optimizer.sgd(params, List.of(grad)).lr(Double.NaN).build());
        assertThrows(TesseraInvalidArgumentException.class,
                () -> Optimizer.sgd(params, List.of(grad)).nesterov(true).build());
        assertThrows(TesseraInvalidArgumentException.class,
                () -> Optimizer.adam(params, List.of(grad)).betas(1.5, 0.9).build());
        assertThrows(TesseraInvalidArgumentException.class,
                () -> Optimizer.lamb(params, List.of(grad)).minCoeff(11).build());
        assertThrows(TesseraInvalidArgumentException.class,
                () -> Optimizer.lion(params, List.of(grad)).betas(0.9, 1).build());
        assertThrows(TesseraInvalidArgumentException.class,
                () -> Optimizer.adagrad(params, List.of(grad)).lrDecay(-1).build());
        assertThrows(TesseraInvalidArgumentException.class,
                () -> Optimizer.adam(params, List.of(Tensor.zeros(DType.F64, 2))).build());
        assertThrows(TesseraInvalidArgumentException.class,
                () -> Optimizer.adam(params, List.of(Tensor.zeros(DType.F32, 3))).build());
        assertThrows(TesseraInvalidArgumentException.class, () -> Optimizer.adamW(
                Params.of("i", Tensor.zeros(DType.I32, 2)), List.of(Tensor.zeros(DType.I32, 2))).build());
        assertThrows(NullPointerException.class, () -> Optimizer.adamW((Ddp) null));
        assertThrows(IllegalArgumentException.class, () -> Params.of("w", weight).and("w", grad));
        final Optimizer closed = Optimizer.sgd(params, List.of(grad)).build();
        closed.close();
        assertThrows(IllegalStateException.class, closed::step);
    }
}
