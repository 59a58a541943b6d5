import { createRoot } from "react-dom/client";
import "uplot/dist/uPlot.min.css";
import { App } from "./App";
import { keepFocus } from "./ui/focus";
import "./styles/tokens.css";
import "./styles/base.css";
import "./styles/ui.css";
import "./styles/charts.css";
import "./styles/pages.css";
import "./styles/rollout.css";

keepFocus();
const root = document.getElementById("root");
if (root) createRoot(root).render(<App />);
