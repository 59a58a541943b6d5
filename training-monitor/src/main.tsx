import { createRoot } from "react-dom/client";
import "uplot/dist/uPlot.min.css";
import { App } from "./App";
import "./styles/tokens.css";
import "./styles/base.css";
import "./styles/ui.css";
import "./styles/charts.css";
import "./styles/pages.css";
import "./styles/rollout.css";

const root = document.getElementById("root");
if (root) createRoot(root).render(<App />);
